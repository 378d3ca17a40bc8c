"""Which later steps and samples erased a sample's influence, ranked (the terms of the paper's Theorem 1).

    influence = just after its own steps + arrived through momentum − erased by later samples − erased by decay

The terms, and why they add up, are in `erasure`. One backward sweep, in float64, for one sample and one query (or the mean
of a set); its free path takes as many vectors as the momentum's buffer lasts.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.ids import as_text, restore
from ..errors import UsageError
from ..maths.adjoint import Adjoint
from ..maths.steps import Contraction
from ..run.embed import Asked, Progress
from ..run.gradients import LossFn
from ..run.occurrences import occurrences, rows_before
from ..run.quality import Watch
from ..run.run import Run
from ..run.sweep import backward, cut, slices
from ..run.windows import refuse_compressed
from ..store import RunStore
from . import plots
from .asking import SIGN, mean_vector
from .erasure import Moved, Pay, Taken, free_path, moved, taken
from .notebook import InNotebook
from .shapes import Curve

STEPS_AT_ONCE = 256  # whose numbers are read together
UNIT = "units of the query's loss; erased: positive took influence away, negative added to it"


@dataclass(frozen=True)
class Eraser:
    """A later sample, and what all its later occurrences took away."""

    sample: int | str
    erased: float
    step: int  # where it took most
    occurrences: int  # later ones


@dataclass(frozen=True)
class Saturation(InNotebook):
    """Where the influence of one sample went."""

    sample: int | str
    steps: tuple[int, ...]  # of its own occurrences
    at: int
    just_after: float  # right after its own steps, on the gradient of the query at `at`
    momentum: float  # what the momentum's buffer added later
    erased: float  # by the curvature of later occurrences, all of them
    decay: float  # by weight decay
    influence: float  # what is left at `at`
    erasers: tuple[Eraser, ...]  # samples, largest first
    by_step: Curve  # (T,) erased at each step, decay included; 0 up to its first own step
    notes: tuple[str, ...] = ()

    @property
    def lost(self) -> float:
        """Influence just after its own steps minus what is left: erased + decay − momentum."""
        return self.just_after - self.influence

    @property
    def unexplained(self) -> float:
        """What the terms leave over: rounding."""
        return self.lost - (self.erased + self.decay - self.momentum)

    def steps_ranked(self, k: int = 10) -> list[tuple[int, float]]:
        """The k steps that erased most, `(step, erased)`."""
        order = np.argsort(-self.by_step, kind="stable")[:k]
        return [(int(t), float(self.by_step[t])) for t in order if self.by_step[t] > 0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(self)
        more = {"lost": self.lost, "unexplained": self.unexplained, "sign": SIGN, "unit": UNIT}
        ranked = [{"step": t, "erased": x} for t, x in self.steps_ranked()]
        return {**found, **more, "by_step": self.by_step.tolist(), "steps_ranked": ranked}

    def figure(self) -> Any:
        """Erased by each step, what was left of it, and the samples that erased most."""
        titles = (
            f"Sample {self.sample}: erased by each later step",
            "The samples that erased most (all their later occurrences)",
        )
        drawn = plots.figure(titles, "", ("influence",) * 2, shared=False)
        whole = self.just_after + self.momentum
        drawn.add_bar(
            y=self.by_step.tolist(), name="erased by the step", marker={"color": plots.COLOURS[1]}, row=1, col=1
        )
        left = (whole - np.cumsum(self.by_step)).tolist()
        drawn.add_scatter(y=left, name="left after the terms so far", line={"color": plots.COLOURS[0]}, row=1, col=1)
        top = self.erasers[:20]
        drawn.add_bar(
            x=[f"{e.sample}" for e in top], y=[e.erased for e in top], name="erased by the sample",
            text=[f"most at step {e.step}" for e in top], marker={"color": plots.COLOURS[4]}, row=2, col=1,
        )  # fmt: skip
        drawn.update_xaxes(title_text="training step", row=1, col=1)
        drawn.update_xaxes(title_text="sample", type="category", row=2, col=1)
        return drawn

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each later sample."""
        return plots.frame(
            {k: [getattr(e, k) for e in self.erasers] for k in ("sample", "erased", "step", "occurrences")}
        )


def saturation(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    sample: int | str,
    at: int | str = "final",
    *,
    step: int | None = None,
    per_layer: bool = False,
    contraction: Asked = "auto",
    unverified: bool = False,
    progress: Progress | None = None,
) -> Saturation:
    """What erased the influence of `sample` (all its occurrences, or the one of `step`) on the queries' mean loss."""
    until = run.step_of(at)
    v, notes = mean_vector(run, model, loss, batch, until, unverified=unverified)
    return saturation_of_vector(
        run,
        v,
        sample,
        until,
        step=step,
        per_layer=per_layer,
        contraction=contraction,
        notes=(*notes, *run.notes()),
        progress=progress,
    )


def saturation_of_vector(
    run: Run,
    v: Tensor,
    sample: int | str,
    at: int | str = "final",
    *,
    step: int | None = None,
    per_layer: bool = False,
    contraction: Asked = "auto",
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Saturation:
    """The same for a ready query gradient (1, p) in the run's coordinates."""
    refuse_compressed(run.store, "saturation")
    until, v = run.step_of(at), v.double()
    samples, steps = occurrences(run.store, rows_before(run.store, until))
    (name,), _ = as_text([sample])
    own = {int(steps[i]): int(i) for i in np.flatnonzero((samples == name) & ((steps == step) | (step is None)))}
    if not own:
        where = "" if step is None else f" at step {step}"
        raise UsageError(f"sample {sample!r} did not occur{where} before step {until}; name one that did.")
    first = min(own)
    moves = {t - first: _moved(run.store, t, row) for t, row in own.items()}
    path = free_path(moves, _pays(run.store, first, until))
    terms = np.zeros(len(samples))
    decay, left = np.zeros(until), 0.0
    watch = Watch(run.store, until, start=first)
    for t, row_start, term, scores in _sweep(
        run.store, v, until, first, path, per_layer, run.form(contraction), watch, progress
    ):
        terms[row_start : row_start + len(term.rows)] = term.rows.numpy()
        decay[t] = term.decay
        left += float(scores[own[t] - row_start]) if t in own else 0.0
    by_step = decay + np.bincount(steps, weights=terms, minlength=until)
    direct = functools.reduce(torch.add, [moves[t].theta for t in sorted(moves)])
    return Saturation(
        sample, tuple(sorted(own)), until, just_after=float(v[0] @ direct), momentum=float(v[0] @ (path[-1] - direct)),
        erased=float(terms.sum()), decay=float(decay.sum()), influence=left,
        erasers=_ranked(samples, steps, terms, first, run.config.get("ids", "str")), by_step=by_step, notes=(*notes, *watch.done().words()),
    )  # fmt: skip


def _sweep(
    store: RunStore,
    v: Tensor,
    at: int,
    first: int,
    path: Sequence[Tensor],
    per_layer: bool,
    contraction: Contraction,
    watch: Watch,
    progress: Progress | None,
) -> Iterator[tuple[int, int, Taken, Tensor]]:
    """(step, its first row, its terms, its influences (B,)) of the steps from `first` on, last first."""
    where = slices(store, per_layer)
    adjoints = [Adjoint(v[:, w], contraction=contraction) for w in where]
    for chunk in backward(store, at, dtype=torch.float64, down_to=first):
        watch.see(chunk)
        end = chunk.row_start + sum(len(s.w) for s in chunk.steps)
        for t, whole in reversed(list(enumerate(chunk.steps, chunk.first_step))):
            end -= len(whole.w)
            parts = [
                (a, cut(whole, w) if per_layer else whole, path[t - first][w])
                for a, w in zip(adjoints, where, strict=True)
            ]
            found = [taken(a, step, d) for a, step, d in parts]
            scores = torch.stack([a.influence(step)[0] for a, step, _ in parts]).sum(0)
            yield t, end, Taken(torch.stack([x.rows for x in found]).sum(0), sum(x.decay for x in found)), scores
        if progress is not None:
            progress(at - chunk.first_step, at - first)


def _moved(store: RunStore, step: int, row: int) -> Moved:
    (chunk,) = backward(store, step + 1, dtype=torch.float64, down_to=step)
    return moved(chunk.steps[0], row - chunk.row_start)


def _pays(store: RunStore, first: int, at: int) -> Iterator[Pay]:
    """μ and η a P of the steps first … at−1: numbers where the parameter groups agree, else vectors."""
    owner = torch.tensor([b["group"] for b in store.config["blocks"]]).repeat_interleave(torch.tensor(store.dims))
    for lo in range(first, at, STEPS_AT_ONCE):
        hi = min(at, lo + STEPS_AT_ONCE)
        groups, P = store.steps(lo, hi).groups, store.diagonal(lo, hi)
        keep, pace = (torch.from_numpy(x) for x in (groups["momentum"], groups["rate"] * groups["a"]))
        for k in range(hi - lo):
            paid = _spread(pace[k], owner)
            yield Pay(_spread(keep[k], owner), paid if P is None else paid * P[k].double())


def _spread(values: Tensor, owner: Tensor) -> float | Tensor:
    return float(values[0]) if bool((values == values[0]).all()) else values[owner]


def _ranked(samples: Any, steps: Any, terms: Curve, first: int, kind: str) -> tuple[Eraser, ...]:
    """Later samples, largest first; those that took nothing are left out."""
    later = np.flatnonzero((steps > first) & (terms != 0))
    names, inverse, counts = np.unique(samples[later], return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=terms[later], minlength=len(names))
    most = later[np.lexsort((-np.abs(terms[later]), inverse))][np.cumsum(counts) - counts] if len(later) else later
    ids = restore([str(x) for x in names], kind)
    order = np.argsort(-sums, kind="stable")
    return tuple(Eraser(ids[j], float(sums[j]), int(steps[most[j]]), int(counts[j])) for j in order)
