"""A recorded run: open, embed and query it.

run = backstory.open("runs/digits")
answer = run.query(model, loss, batch)
answer.top(5)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.ids import as_text, restore
from ..capture.model_state import load_weights
from ..capture.precision import own_precision
from ..errors import UnsupportedError, UsageError
from ..maths.steps import Contraction
from ..replay.queries import QuerySets
from ..replay.tape import RecipeSource
from ..results.effects import FIRST_ORDER, MOVED
from ..results.influence import Influence
from ..results.origin import Remedy
from ..results.quality import Quality
from ..results.recording_report import RecordingReport
from ..results.result import frame, show_table
from ..store import RunStore, StepTable
from ..store.run_store import Labels
from . import exact as exactly
from .calibrate import (
    REMOVALS,
    SINGLES,
    calibrate,
    describe_stale,
    describe_unread,
    form_of,
    quality_of,
    read_calibration,
    unmeasured,
)
from .caveats import caveats_of
from .changes import About, WeightChanges, stored_changes
from .compress import RANK, CompressReport, compress
from .embed import ContractionChoice, EmbedReport, Form, Progress, check_options, contraction_of, embed
from .gradients import Evaluated, LossFn, ModelAt, check_model, evaluate, evaluate_loss
from .groups import By
from .kind import is_mean
from .left_out import leave_out
from .lookup import Lookup, count_queries, find, keep_ends
from .memory import Memory, embedding_bytes
from .methods import choose_method, seeks_exact
from .recording_report import Watch, read_report, report_on
from .remedy import not_stored, remedy
from .removal import RemovalEffect, corrected
from .same_loss import slopes
from .scoring import by_adjoint, by_embeddings, collect, collect_best
from .segments import boundaries, by_segments, embed_segments, path_to, report_of, vectors_at
from .tangents import carry, moved, tangents_of

SHOWN = ("text", "image", "label", "source")


def open_run(path: str | Path) -> "Run":
    """Open a recorded run to read and query it."""
    return Run(path)


class Run:
    """A run on disk. Reading never changes the recording; `embed` and `describe` take its write lock."""

    def __init__(self, path: str | Path, memory: Memory | None = None, named: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._store = RunStore.open(self.path)
        self._memory = Memory() if memory is None else memory
        self._named: Mapping[str, Any] = QuerySets(self._store) if named is None else named
        self._unmixed = WeakKeyDictionary[
            nn.Module, set[Evaluated]
        ]()  # how queries of a model were evaluated all together

    def reopen(self) -> "Run":
        """The same run opened again, for another thread: it shares the embeddings that are in memory."""
        return Run(self.path, self._memory, self._named)

    def name_queries(self, sets: Mapping[str, Any]) -> None:
        """Query sets that results may call by name, after those that the run stores: a recipe's."""
        stored = dict(QuerySets(self._store))
        self._named = {**stored, **sets, **stored}

    def __repr__(self) -> str:
        size = f"{self.n_steps:,} steps, {self.n_occurrences:,} occurrences, {self.width:,}"
        return f"Run({str(self.path)!r}: {size} {self.config['settings']['projection']} dimensions)"

    def _repr_html_(self) -> str | None:
        try:
            return show_table(f"Run {self.path}", frame(_facts(self)), self.caveats())
        except UnsupportedError:  # pandas is not there: the notebook prints `repr`
            return None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close(compact=False)

    @property
    def config(self) -> dict[str, Any]:
        """The current contents of `config.json`: what was recorded, and how."""
        return self._store.read_config()

    @property
    def n_steps(self) -> int:
        """How many steps are recorded."""
        return self._store.n_steps()

    @property
    def n_occurrences(self) -> int:
        """How many times any sample was used in the recorded steps."""
        return self._store.n_rows()

    @property
    def width(self) -> int:
        """Projection size: the dimensions of a projected gradient and of an embedding."""
        return self._store.width

    def steps(self, lo: int = 0, hi: int | None = None) -> StepTable:
        """What was recorded about the steps `lo` to `hi`: learning rates, clipping, norms, coverage."""
        return self._store.steps(lo, hi)

    def occurrences(self, at: int | str = "final") -> Labels:
        """`(sample ids as text, steps)` of all occurrences before `at`, (N,) each, in the order of training."""
        step = self.step_of(at)
        if (embedded := self._memory.get(self._store, step)) is not None:
            return embedded.samples, embedded.steps
        return self._store.occurrences(self._store.rows_before(step))

    @property
    def checkpoints(self) -> list[int]:
        """Steps whose weights are stored in the run."""
        return self._store.checkpoints()

    def step_of(self, at: int | str) -> int:
        """`at` as a step number: "final", or a step t, meaning the model before update t."""
        return self._store.step_of(at)

    def load_weights(self, model: nn.Module, at: int | str = "final") -> nn.Module:
        """Load the weights that the run stored at a checkpoint into `model`."""
        step = self.step_of(at) if at != 0 else 0
        tensors = self._store.load_checkpoint(step)
        load_weights(model, tensors)
        return model

    @own_precision()
    def embed(
        self,
        at: int | str = "final",
        *,
        per_layer: bool = False,
        contraction: ContractionChoice = "auto",
        dtype: torch.dtype = torch.float32,
        encoding: str = "float16",
        segments: int | None = None,
        workers: int = 1,
        progress: Progress | None = None,
    ) -> EmbedReport:
        """Compute and store the embeddings of all occurrences before `at` (Algorithm 1).

        `per_layer=True` treats parameters as independent, as the paper does. `contraction="never"` is the paper's literal form,
        "always" the implicit form with γ = 1/(1−μ), "when_expanding" the implicit form only at steps that could expand, and
        "auto" the one that measured best (`form`). With `segments=K` (Algorithm 2) the run is split into at least K segments,
        which `workers` processes embed in parallel; queries at `at` and at every earlier checkpoint then use them. Finished
        segments survive an interruption. Each stores a propagator of 4 p² bytes (16 p² with momentum or Adam).
        """
        step = self.step_of(at)
        form = Form(per_layer, self.form(contraction), str(dtype).removeprefix("torch."), encoding)
        check_options(self._store, dtype=dtype, encoding=encoding, segments=segments, workers=workers)
        with RunStore.open(self.path, write=True) as store:
            if segments is None and workers == 1:
                report = embed(store, step, form, progress=progress)
            else:
                spans = boundaries(store, step, min(step, workers) if segments is None else segments)
                report = embed_segments(store, spans, form, workers=workers, progress=progress)
        self._store = RunStore.open(self.path)
        return report

    @own_precision()
    def embeddings(
        self, at: int | str = "final", *, per_layer: bool = False, contraction: ContractionChoice = "auto"
    ) -> Tensor:
        """The embeddings (N, dims) of all occurrences before `at`, on the model at `at`, from what `embed` has stored."""
        step, contraction = self.step_of(at), self.form(contraction)
        how = choose_method(self._store, "embeddings", step, per_layer, contraction)
        if how == "embeddings":
            embedded = self._memory.get(self._store, step)
            rows = self._store.rows_before(step)
            return self._store.read_embeddings(step, 0, rows) if embedded is None else embedded.E.clone()
        parts = dict(vectors_at(self._store, path_to(self._store, step, per_layer, contraction), per_layer))
        return torch.cat([parts[first] for first in sorted(parts)])

    def has_embeddings(self, at: int | str = "final") -> bool:
        """Whether queries at `at` use stored embeddings or segments, without a sweep."""
        return choose_method(self._store, "auto", self.step_of(at), False, self.form()) != "adjoint"

    def sample_embeddings(self, sample: int | str, at: int | str = "final") -> Tensor | None:
        """The embeddings (n, dims) of a sample's occurrences before `at`, if `load_embeddings` has loaded them; else None."""
        step, (name,) = self.step_of(at), as_text([sample])[0]
        embedded = self._memory.get(self._store, step) if self._has_default_embeddings(step) else None
        if embedded is None:
            return None
        if not len(rows := np.flatnonzero(embedded.samples == name)):
            raise UsageError(f"sample {sample!r} was never used before step {step}.")
        return embedded.E[torch.from_numpy(rows)]

    def _has_default_embeddings(self, step: int) -> bool:
        """Whether the embeddings that are stored for a step are those that a query without further arguments uses."""
        return choose_method(self._store, "auto", step, False, self.form()) == "embeddings"

    def model_at(
        self, model: nn.Module, at: int | str = "final", *, unverified: bool = False, like: ModelAt | None = None
    ) -> ModelAt:
        """A model of the run that computes gradients for `query_gradients` repeatedly; `like` shares its projection."""
        return ModelAt(
            self._store, model, self.step_of(at), unverified=unverified, bases=None if like is None else like.bases,
            unmixed=self._unmixed.setdefault(model, set()),
        )  # fmt: skip

    def load_embeddings(self, at: int | str = "final", *, room: int | None = None) -> bool:
        """Load the stored embeddings for `at` into memory, so that queries at that step do not read from disk.

        Returns False if none are stored (or only segments, or embeddings of another form than queries use by default), or if
        they take more than `room` bytes.
        """
        step = self.step_of(at)
        return self._has_default_embeddings(step) and self._memory.load(self._store, step, room)

    def embedding_bytes(self, at: int | str = "final") -> int:
        """How much memory the embeddings of a step take."""
        return embedding_bytes(self._store, self.step_of(at))

    def drop_embeddings(self, at: int | str = "final") -> None:
        """Free the memory that `load_embeddings` took; the files stay."""
        self._memory.drop(self.step_of(at))

    @own_precision()
    def compress(
        self,
        out: str | Path,
        *,
        rank: int | None = RANK,
        windows: int | None = None,
        encoding: str | None = None,
        progress: Progress | None = None,
    ) -> CompressReport:
        """Write a smaller copy of this run to `out`: with fewer curvature directions per window, or in another encoding.

        Each window retains the `rank` leading directions of its curvature (None: all). Of a run that stores curvature samples of
        every occurrence, `windows` are made (by default one for four times as many occurrences as the rank). This run is not
        changed; embeddings are not copied.
        """
        with RunStore.open(self.path, write=True) as store:
            return compress(store, Path(out), rank=rank, windows=windows, encoding=encoding, progress=progress)

    def query(
        self,
        model: nn.Module,
        loss: LossFn,
        batch: Any = None,
        at: int | str = "final",
        *,
        method: str = "auto",
        per_layer: bool = False,
        contraction: ContractionChoice = "auto",
        mode: str = "eval",
        keep: int | None = None,
        unverified: bool = False,
        progress: Progress | None = None,
    ) -> Influence:
        """The influence of every occurrence before `at` on the queries: `loss(model)`, or `loss(model, batch)` where there is a batch.

        A loss vector (Q,) is Q queries, a scalar is one. `model` must be the model at `at`: its fingerprint is checked
        (`unverified=True` allows a step of which the run has no fingerprint). `keep=k` returns only the k highest and lowest
        occurrences of each query. `method` is "auto" (the exact result if it is stored, else from the recording), "exact"
        (stored by `run.exact`), "adjoint" (a reverse sweep over the recording) or "embeddings".
        """
        step = self.step_of(at)
        _check_keep(keep)
        exact = seeks_exact(method, per_layer, contraction, mode)
        found = self.find_exact(model, loss, batch, step, method=method, unverified=unverified) if exact else Lookup()
        if found.result is not None:
            return found.result if keep is None else keep_ends(found.result, keep)
        v, caveats = self.model_at(model, step, unverified=unverified).gradients(loss, batch, mode)
        result = self.query_gradients(
            v, step, method=method, per_layer=per_layer, contraction=contraction, keep=keep, progress=progress, caveats=(*caveats, *found.notes)
        )  # fmt: skip
        if len(v) == 1 and self.is_mean(batch, step):
            form: dict[str, Any] = {"per_layer": per_layer, "contraction": contraction, "method": method}
            result = replace(result, quality=self.quality(step, mean=True, **form))
        return replace(result, remedy=self.remedy(batch, step, len(v)))

    def find_exact(
        self,
        model: nn.Module,
        loss: LossFn,
        batch: Any,
        at: int | str = "final",
        *,
        mean: bool = False,
        method: str = "auto",
        unverified: bool = False,
    ) -> Lookup:
        """The stored exact result of a query, or with `mean` of the queries' mean loss; method="exact" raises where there is none."""
        step, checked = self.step_of(at), list[str]()

        def losses() -> Tensor:
            checked.extend(check_model(self._store, model, step, unverified))
            return evaluate(model, lambda m, b: evaluate_loss(loss, m, b), batch)

        def measure(whole: bool) -> list[float]:
            values = partial(evaluate_loss, loss, model, batch)
            return slopes(self._store, model, (lambda: values().mean()) if whole else values)

        found = find(self._store, batch, step, losses, measure, mean=mean)
        if found.result is not None:
            count = found.result.n_queries
            judged = self._judged(step, count, mean=count == 1 < count_queries(batch), exact=True)
            caveats = (*checked, *found.result.caveats)
            return Lookup(replace(found.result, caveats=caveats, lookup=self.content, **judged))
        if method == "exact":
            raise UsageError(not_stored(self.remedy(batch, step), step, found.notes))
        return found

    def remedy(self, batch: Any, at: int | str = "final", queries: int = 1) -> Remedy | None:
        """What would make results for the mean of a batch, or for so many queries of it, exact: a command, and its time."""
        return remedy(self._store, self._named, batch, self.step_of(at), queries)

    def is_mean(self, batch: Any, at: int | str = "final", losses: int = 1) -> bool:
        """Whether a result on so many losses of a batch, taken together, is on the mean of several queries, not on one.

        One loss is one query, also where it sums or averages rows (pieces of one text), unless the batch is a query set: one that the run
        stores, its recipe has, or `calibrate` measured.
        """
        return is_mean(self._store, self._named, batch, losses, self.step_of(at))

    @own_precision()
    def query_gradients(
        self,
        v: Tensor,
        at: int | str = "final",
        *,
        method: str = "auto",
        per_layer: bool = False,
        contraction: ContractionChoice = "auto",
        keep: int | None = None,
        progress: Progress | None = None,
        caveats: Sequence[str] = (),
    ) -> Influence:
        """Like `query`, from query gradients (Q, dims) already projected to the run's coordinates."""
        step = self.step_of(at)
        if v.dim() != 2 or v.shape[1] != self._store.width or not bool(v.isfinite().all()):
            raise UsageError(
                f"query vectors must be finite and of shape (Q, {self._store.width}), got {tuple(v.shape)}."
            )
        _check_keep(keep)
        contraction = self.form(contraction)
        how = choose_method(self._store, method, step, per_layer, contraction)
        n_rows, embedded = self._store.rows_before(step), self._memory.get(self._store, step)
        v = v if v.dtype == torch.float64 else v.float()
        watch = Watch(self._store, step) if how == "adjoint" else None
        spans = path_to(self._store, step, per_layer, contraction) if how == "segments" else []
        if watch is not None:
            scores = by_adjoint(
                self._store, v, step, per_layer=per_layer, contraction=contraction, progress=progress, watch=watch
            )
        elif spans:
            scores = by_segments(self._store, spans, v, per_layer, progress)
        else:
            scores = by_embeddings(self._store, v, step, n_rows, progress, None if embedded is None else embedded.E)
        notes = (*caveats, *self.caveats(), *(("parameters treated as independent",) if per_layer else ()))
        more: dict[str, Any] = {"index": None if embedded is None else embedded.sample_index}
        if keep is None:
            values, labels = collect(scores, len(v), n_rows), self.occurrences(step)
        else:
            values, rows = collect_best(scores, len(v), keep)
            labels, more = self._store.labels(rows), {"complete": False}
            more["best"] = keep if values.shape[1] < n_rows else None
        more |= self._judged(step, len(v), per_layer=per_layer, contraction=contraction, method=method)
        measured = report_of(self._store, spans) if spans else watch.done() if watch else self._stored_report(step)
        return Influence(
            values, *labels, id_kind=self.config.get("ids", "str"), at=step, method=how, caveats=notes, lookup=self.content,
            recording=measured, **more,
        )  # fmt: skip

    def _stored_report(self, step: int) -> RecordingReport | None:
        """What was measured when the embeddings were made, and is stored beside them."""
        return read_report(self._store.embeddings().get(step, {}))

    def exact(
        self,
        queries: str | Sequence[str],
        recipe: RecipeSource,
        at: int | str = "final",
        *,
        each: bool = False,
        since: int = 0,
        args: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        check: bool = True,
        workers: int = 1,
        progress: Progress | None = None,
    ) -> Influence:
        """The exact first-order influence of every occurrence on queries: NAME is the mean loss of a query set, NAME:INDEX one query.

        The recipe is replayed, checked against the run's stored weights (`check=False` goes on all the same, with a
        caveat; only calls with `check=False` find what it stores) and differentiated through every step: a few times the training's cost for one query, less for each further one. Results are
        stored in the run, and a second call reads them; one that was interrupted goes on. `each` computes every query of a set
        instead of the mean, `since` leaves earlier steps out, which shortens the backward sweep, `dtype` is another precision than the recipe's.
        `workers` processes share the queries. If the recipe is the one named in the run, `args` default to the run's.
        """
        names = [queries] if isinstance(queries, str) else list(queries)
        spec = exactly.Spec(self.step_of(at), since, dtype, check)
        result, sizes = exactly.exact(
            self._store, recipe, names, spec, each=each, args=args, workers=workers, progress=progress
        )
        judged = self._judged(spec.at, result.n_queries, mean=min(sizes) > 1, exact=True)
        return replace(result, lookup=self.content, **judged)

    def exact_results(self) -> list[exactly.Stored]:
        """The exact results that are stored in the run."""
        return exactly.stored_results(self._store)

    def leave_out(
        self,
        groups: By,
        recipe: RecipeSource | None = None,
        *,
        others: str = "keep",
        empty: str = "coast",
        twins: int = 3,
        workers: int = 1,
        args: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        check: bool = True,
        progress: Progress | None = None,
    ) -> WeightChanges:
        """Train again without each of the groups; `.effects(…)` of the result gives what that does to any query.

        `groups` is "source", "label", "epoch", "parts:K", several of these with commas, or {name: ids}. Each group takes at most
        one training, from the state before its first use; all else is equal. The other samples keep their weights (`others="keep"`) or are
        scaled so that a step's weights add up to what they did ("renormalise"). A step without samples takes an optimizer step with gradient 0
        (`empty="coast"`, the definition that tangents are the derivative of) or none ("skip"). `twins` trainings that start one
        rounding unit away measure what rounding does. The weights at the run's checkpoints are stored in the run, as differences: a
        second call reads them, without a recipe; one that was interrupted goes on. `workers` processes share the groups.
        """
        return leave_out(
            self, self._store, groups, recipe, others=others, empty=empty, twins=twins, workers=workers, args=args, dtype=dtype,
            check=check, progress=progress,
        )  # fmt: skip

    def tangents(
        self,
        groups: By,
        recipe: RecipeSource | None = None,
        *,
        workers: int = 1,
        args: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        check: bool = True,
        progress: Progress | None = None,
    ) -> WeightChanges:
        """The exact derivative of the weights as each group's are lowered, at every checkpoint; `.effects(…)` gives any query's.

        First order, and groups add up: those of "source,parts:8" are totals by source and time. Stored and read as by `leave_out`.
        """
        how: dict[str, Any] = {"args": args, "dtype": dtype, "check": check, "progress": progress}
        return carry(self._store, FIRST_ORDER, *tangents_of(self, groups), recipe, workers=workers, **how)

    def move(
        self,
        samples: Iterable[int | str],
        to: int,
        recipe: RecipeSource | None = None,
        *,
        steps: Sequence[int] | None = None,
        args: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        check: bool = True,
        progress: Progress | None = None,
    ) -> WeightChanges:
        """What if these samples had come at step `to` instead of at their own (or instead of at these `steps` only)? To first order.

        They are left out there, and put into the batch of step `to` with the weights they had.
        """
        how: dict[str, Any] = {"args": args, "dtype": dtype, "check": check, "progress": progress}
        return carry(self._store, MOVED, *moved(self, samples, to, steps), recipe, workers=1, **how)

    def weight_changes(self) -> list[About]:
        """What is stored of `leave_out` (twins included), `tangents` and `move`."""
        return stored_changes(self._store)

    def predict_removal(
        self,
        samples: Iterable[int | str] | Tensor,
        model: nn.Module,
        loss: LossFn,
        batch: Any = None,
        at: int | str = "final",
        *,
        contraction: ContractionChoice = "auto",
        mode: str = "eval",
        unverified: bool = False,
        progress: Progress | None = None,
    ) -> RemovalEffect:
        """Influence (Q, M) of removing each of these samples from all its occurrences: plain sum, and corrected.

        The correction accounts for a removed sample's own curvature, which is missing at its later occurrences too; it takes a
        forward sweep over the run.
        """
        step = self.step_of(at)
        names, kind = as_text(samples)
        v, _ = self.model_at(model, step, unverified=unverified).gradients(loss, batch, mode)
        summed = self.query_gradients(v, step, method="adjoint", contraction=contraction)
        exact = corrected(self._store, v, step, names, contraction=self.form(contraction), progress=progress)
        plain = torch.stack([summed.sum_over([x]) for x in restore(names, kind)], 1)
        return RemovalEffect(tuple(restore(names, kind)), plain, exact)

    def form(self, contraction: ContractionChoice = "auto") -> Contraction:
        """The form that "auto" stands for in this run: "always" if curvature is split by position groups."""
        return contraction_of(contraction, self.config["settings"]["curvature"], self._store.has_windows)

    def quality(
        self,
        at: int | str = "final",
        *,
        mean: bool = False,
        exact: bool = False,
        per_layer: bool = False,
        contraction: ContractionChoice = "auto",
        method: str = "auto",
    ) -> Quality:
        """How well values of the model at `at` rank the uses of the training data, as `calibrate` measured it.

        Of recorded values by a `method` or of `exact` ones; on single queries, or on the `mean` of many. What was measured on another form of the
        recording does not count, and the result says so.
        """
        step, sets = self.step_of(at), list(self._named)
        made, form = read_calibration(self._store, step), form_of(self._store, step, False, self.form())
        wanted = form if exact else form_of(self._store, step, per_layer, self.form(contraction), method)
        stale = describe_unread(self._store, step) if made is None else "" if exact else describe_stale(made, wanted)
        if made is None or stale:
            return unmeasured(self._store, step, sets, exact=exact, stale=stale, remedy=wanted == form)
        known = quality_of(made, exact=exact, mean=mean)
        return known if known.measured else unmeasured(self._store, step, sets, exact=exact)

    def _judged(self, step: int, queries: int, *, mean: bool = False, **form: Any) -> dict[str, Any]:
        """The quality of an influence on so many queries, each a `mean` or a single one; of several also that of their mean."""
        of_mean = self.quality(step, mean=True, **form) if queries > 1 else None
        return {"quality": self.quality(step, mean=mean, **form), "of_mean": of_mean}

    @own_precision()
    def calibrate(
        self,
        queries: str,
        recipe: RecipeSource,
        at: int | str = "final",
        *,
        singles: int = SINGLES,
        removals: int = REMOVALS,
        seed: int = 0,
        args: Mapping[str, Any] | None = None,
        workers: int = 1,
        progress: Progress | None = None,
    ) -> Quality:
        """Measure how well this recording ranks, on the run itself: every result then carries it as `quality`.

        Recorded influences on the mean of a query set and on `singles` single queries of it are compared with exact ones, by parts of the
        run; and exact ones with training again without `removals` single uses, drawn by `seed` from all parts of the run. What was measured
        is stored in the run, in the place of what was measured before; an interrupted call goes on. `workers` processes share the work.
        """
        step = self.step_of(at)
        calibrate(
            self, self._store, queries, recipe, step, singles=singles, removals=removals, seed=seed, args=args,
            workers=workers, progress=progress,
        )  # fmt: skip
        return self.quality(step, mean=True)

    def recording_report(self, at: int | str = "final") -> RecordingReport:
        """What the recorded steps before `at` are like: stored with the embeddings, or measured in one pass over the run."""
        step = self.step_of(at)
        return self._stored_report(step) or report_on(self._store, step)

    def caveats(self) -> tuple[str, ...]:
        """Caveats that every result from this recording carries."""
        return caveats_of(self._store, self.config)

    def describe(self, ids: Iterable[int | str] | Tensor, **content: Sequence[Any] | None) -> None:
        """Store text, image (PNG bytes), label or source of samples after recording."""
        label = content.get("label")
        if label is not None and not isinstance(label, str):
            content["label"] = [None if x is None else str(x) for x in label]
        with RunStore.open(self.path, write=True) as store:
            store.put_samples(as_text(ids)[0], **content)
        self._store = RunStore.open(self.path)

    def erase_content(self, ids: Iterable[int | str] | Tensor | None) -> int:
        """Erase the stored content of these samples (None: of all) from disk; their gradients stay. Returns how many."""
        names = None if ids is None else as_text(ids)[0]
        unknown = set(names or ()) - set(self.content(names or []))
        if unknown:
            raise UsageError(
                f"{len(unknown)} of these samples, such as {min(unknown)!r}, have no content in the run. Nothing was "
                "erased. Leave these ids out, or pass None to erase all content."
            )
        with RunStore.open(self.path, write=True) as store:
            gone = store.erase_samples(names)
        self._store = RunStore.open(self.path)
        return gone

    def content(self, ids: Iterable[int | str] | Tensor, columns: Sequence[str] = SHOWN) -> dict[str, dict[str, Any]]:
        """The stored content of these samples: id (as text) -> {text, image, label, source}, or only these columns."""
        return {row["id"]: row for row in self._store.samples(as_text(ids)[0], columns).to_pylist()}

    def add_queries(self, name: str, batch: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        """Store a query set under a name: a tensor, a tuple of tensors, or a dict of tensors."""
        with RunStore.open(self.path, write=True) as store:
            store.put_queries(name, batch)

    @property
    def query_sets(self) -> list[str]:
        """Names of the stored query sets."""
        return self._store.query_sets()

    def queries(self, name: str) -> Any:
        """A stored query set, as it was given."""
        return self._store.queries(name)


def _check_keep(keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise UsageError(f"keep must be at least 1, or None to keep all occurrences, got {keep}.")


def _facts(run: Run) -> dict[str, list[str]]:
    """What a run holds, as the columns of a table."""
    config, store = run.config, run._store
    facts = {
        "steps": f"{run.n_steps:,}",
        "occurrences": f"{store.n_rows():,}",
        "optimizer": config["optimizer"]["class"],
        "projection size": f"{store.width:,} ({config['settings']['projection']})",
        "curvature": config["settings"]["curvature"],
        "checkpoints": ", ".join(map(str, run.checkpoints)) or "none",
        "embeddings": ", ".join(map(str, sorted(store.embeddings()))) or "none",
        "query sets": ", ".join(run.query_sets) or "none",
        "recipe": config.get("recipe") or "none",
    }
    return {"what": list(facts), "value": list(facts.values())}
