"""Exact results of a recorded run: the recipe is replayed and differentiated step by step, and the scores are stored in the run.

A query is one of a query set, or the mean loss of a set. Its scores are one file of the run, named by a hash of what decides them: the
run, the query's own bytes, the steps, the precision and whether the replay had to agree with the run. So a second call reads what the first computed, queries that are new are
computed in blocks, and each block goes on where it was interrupted. `lookup` finds results for a batch and a loss.

Shapes:  Q queries, N occurrences.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.fingerprint import batch_fingerprint
from ..capture.model_state import load_weights
from ..errors import MismatchError, StoreError, UsageError
from ..exact.cache import digest
from ..exact.costs import BLOCK
from ..exact.reverse import HOW, check_replay, reverse
from ..replay.queries import QuerySets, part, size
from ..replay.recipe import Recipe, stored_args
from ..replay.tape import Progress, RecipeSource, build_recipe, convert
from ..results.influence import Influence
from ..store import RunStore
from ..store.files import write_tensors
from .changes import check_order
from .gradients import evaluate
from .pieces import Piece, compute, settle, split_evenly, work_folder
from .same_loss import same_loss, slopes

PREFIX = "exact-"


@dataclass(frozen=True)
class Query:
    """One query: how it was selected, and its batch, whose mean loss it is."""

    name: str
    batch: Any

    @property
    def count(self) -> int:
        """Of how many losses it is the mean."""
        return size(self.batch)


@dataclass(frozen=True)
class Spec:
    """What decides an exact result beside its query."""

    at: int
    since: int
    dtype: torch.dtype | None
    check: bool = True  # whether the replay must agree with the run

    @property
    def precision(self) -> str:
        """The precision by name; "" for that of the recipe."""
        return "" if self.dtype is None else name_dtype(self.dtype)


@dataclass(frozen=True)
class Stored:
    """What a run says of one of its exact results."""

    query: str  # as it was selected
    batch: str  # its fingerprint
    losses: int  # of which it is the mean
    loss: float  # that mean at step `at`: the stored weights', or else the replay's
    slope: float | None  # the norm of its gradient on the stored weights; None where there are none
    at: int
    since: int
    precision: str  # that was chosen; "" for the recipe's own
    computed_in: str
    checked: bool  # whether the recipe had to reproduce the run
    replay: str  # how well it did
    seconds: float
    caveats: tuple[str, ...] = ()


def select(run: RunStore, recipe: Recipe, names: Sequence[str], each: bool) -> list[Query]:
    """The queries that these names mean: the mean of a set, or with `each` every query of it, or single ones."""
    sets, out = QuerySets(run, recipe), []
    for name in names:
        batch = sets.select(name)
        single = each and sets.parse(name)[1] is None
        out += (
            [Query(f"{name}:{i}", part(batch, i, i + 1)) for i in range(size(batch))]
            if single
            else [Query(name, batch)]
        )
    if len({q.name for q in out}) < len(out):
        raise UsageError(f"queries must be unique: one is listed twice in {', '.join(names)}.")
    return out


def exact(
    store: RunStore,
    recipe: RecipeSource,
    names: Sequence[str],
    spec: Spec,
    *,
    each: bool = False,
    args: Mapping[str, Any] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> tuple[Influence, list[int]]:
    """The exact influence of every occurrence of the steps on each of the queries, and of how many losses each is the mean.

    What is not stored is computed, then stored.
    """
    args = stored_args(store, recipe) if args is None else args
    made = build_recipe(recipe, args)
    queries = select(store, made, names, each)
    settle(store)
    known = set(store.tensor_names())
    files = {q.name: result_name(store, q, spec) for q in queries}
    _check_losses(store, made, {files[q.name]: q for q in queries if files[q.name] in known}, spec.at)
    blocks = [[q.name for q in few if files[q.name] not in known] for few in split_evenly(queries, BLOCK, workers)]
    if any(blocks):
        check_order(store, made, spec.at)
        replay = check_replay(store, recipe, args, spec.at, check=spec.check)
        pieces = [
            _piece((store.path, recipe, args, block, spec, replay), [files[name] for name in block])
            for block in blocks
            if block
        ]
        compute(store, sweep_block, pieces, workers, recipe, progress)
    return read(store, [*files.values()]), [q.count for q in queries]


def _check_losses(store: RunStore, recipe: Recipe, reused: Mapping[str, Query], at: int) -> None:
    """What is stored must be of the recipe's loss; it is compared where the run stores the weights."""
    if not reused or at not in store.checkpoints():
        return
    losses = _stored_losses(store, recipe, [*reused.values()], at)
    for (name, query), loss in zip(reused.items(), losses, strict=True):
        about = read_about(store, name)
        if not same_loss(float(loss), about.loss, name_dtype(loss.dtype), about.computed_in):
            raise MismatchError(
                f"the stored exact result of {query.name} is of another loss than the recipe's ({about.loss:.4g} there, "
                f"{float(loss):.4g} here). Pass the run's own recipe, or delete {name}.safetensors to compute it again."
            )


def _piece(args: tuple[Any, ...], files: list[str]) -> Piece:
    return Piece(args, tuple(files), f"reverse-{digest(files)}")


def sweep_block(
    path: Path,
    recipe: RecipeSource,
    args: Mapping[str, Any] | None,
    names: Sequence[str],
    spec: Spec,
    replay: str,
    progress: Progress | None = None,
) -> None:
    """One sweep for a block of queries, each written when the sweep is done."""
    began, work, store = time.perf_counter(), work_folder(path), RunStore.open(path)
    made = build_recipe(recipe, args)
    block = select(store, made, names, False)

    seen = torch.zeros(len(block))

    def losses(model: nn.Module) -> Tensor:
        nonlocal seen
        dtype = next(model.parameters()).dtype
        values = torch.stack([made.loss(model, convert(q.batch, dtype)).mean() for q in block])
        seen = values.detach()
        return values

    key = digest([result_name(store, q, spec) for q in block])
    result = reverse(
        recipe, losses, args=args, at=spec.at, since=spec.since, dtype=spec.dtype, cache=work, key=key, run=store,
        progress=progress,
    )  # fmt: skip
    seconds = round((time.perf_counter() - began) / len(block), 3)
    values, dtype = _losses_at(store, made, block, spec.at, seen), name_dtype(seen.dtype)
    steep = _slopes_at(store, made, block, spec.at)
    for q, scores, loss, slope in zip(block, result.scores, values.tolist(), steep, strict=True):
        mark, chosen = batch_fingerprint(q.batch), (spec.at, spec.since, spec.precision, dtype, spec.check)
        about = Stored(q.name, mark, q.count, loss, slope, *chosen, replay, seconds, result.caveats)
        file = work / f"{result_name(store, q, spec)}.safetensors"
        write_tensors(file, {"scores": scores}, {"about": json.dumps(asdict(about))}, checked=True)


def _losses_at(store: RunStore, recipe: Recipe, block: Sequence[Query], at: int, replayed: Tensor) -> Tensor:
    """The queries' mean losses (Q,) on the weights that the run stores of this step; else on the replay's, as they were."""
    if at not in store.checkpoints():
        return replayed.double()
    return torch.stack(_stored_losses(store, recipe, block, at)).double()


def _slopes_at(store: RunStore, recipe: Recipe, block: Sequence[Query], at: int) -> list[float | None]:
    """The norms of their gradients (Q,) on those weights; None where the run stores none."""
    if at not in store.checkpoints():
        return [None] * len(block)
    load_weights(recipe.model, store.load_checkpoint(at))
    return [slopes(store, recipe.model, partial(_mean_loss, recipe, q))[0] for q in block]


def _mean_loss(recipe: Recipe, query: Query) -> Tensor:
    return recipe.loss(recipe.model, query.batch).mean()


def _stored_losses(store: RunStore, recipe: Recipe, block: Sequence[Query], at: int) -> list[Tensor]:
    load_weights(recipe.model, store.load_checkpoint(at))
    return [evaluate(recipe.model, recipe.loss, q.batch).mean() for q in block]


def name_dtype(dtype: torch.dtype) -> str:
    """A precision as a run stores it."""
    return str(dtype).removeprefix("torch.")


def result_name(store: RunStore, query: Query, spec: Spec) -> str:
    """The name of a query's result."""
    return name_result(store, batch_fingerprint(query.batch), spec.at, spec.since, spec.precision, spec.check)


def name_result(store: RunStore, batch: str, at: int, since: int, precision: str, checked: bool) -> str:
    """The name of a result's file: a hash of what decides it; of a run that was resumed since, another one."""
    return f"{PREFIX}{digest([store.config.get('fingerprints', {}), batch, at, since, precision, checked])}"


def stored_results(store: RunStore) -> list[Stored]:
    """The exact results that a run has; those of steps that were recorded anew since are not its own any more."""
    store.read_config()
    names = [name for name in store.tensor_names() if name.startswith(PREFIX)]
    every = {name: read_about(store, name) for name in names}
    return [
        x for name, x in every.items() if name == name_result(store, x.batch, x.at, x.since, x.precision, x.checked)
    ]


def read_about(store: RunStore, name: str) -> Stored:
    """What a run says of one result."""
    about = json.loads(store.tensor_metadata(name)["about"])
    return Stored(**{**about, "caveats": tuple(about["caveats"])})


def read(store: RunStore, names: Sequence[str]) -> Influence:
    """Stored results of one step as one, a row for each."""
    about = [read_about(store, name) for name in names]
    rows = [store.load_tensors(name)["scores"] for name in names]
    since, at = about[0].since, about[0].at
    first, last = (store.rows_before(step) for step in (since, at))
    ids, steps = store.occurrences(last)
    if any(row.shape != (last - first,) for row in rows):
        raise StoreError(
            f"an exact result of {store.path} has not one score for each of its {last - first:,} occurrences: it is "
            "damaged, or of another run. Delete its exact-*.safetensors files and compute them again."
        )
    caveats = [*dict.fromkeys(x for one in about for x in (one.replay, *one.caveats))]
    caveats += [f"computed in {x}" for x in dict.fromkeys(one.precision for one in about) if x]
    if len(about) == 1 and about[0].losses > 1:
        caveats.append(f"influence on the mean loss of {about[0].losses:,} queries")
    if since:
        caveats.append(f"steps {since} to {at - 1} only")
    return Influence(
        torch.stack(rows), ids[first:], steps[first:], store.config.get("ids", "str"), HOW, at=at,
        caveats=(*caveats, "evaluated in eval mode"),
    )  # fmt: skip
