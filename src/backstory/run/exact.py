"""Exact results of a recorded run: the recipe is replayed and differentiated step by step, and the scores are stored in the run.

A query is one of a query set, or the mean loss of a set. Its scores are one file of the run, named by a hash of what decides them: the
run, the query's own bytes, the steps and the precision. So a second call reads what the first computed, queries that are new are
computed in blocks, and each block goes on where it was interrupted.

Shapes:  Q queries, N occurrences.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.fingerprint import batch_fingerprint
from ..errors import StoreError, UsageError
from ..exact.cache import digest
from ..exact.reverse import HOW, check_replay, reverse
from ..replay.queries import QuerySets, part, size
from ..replay.recipe import Recipe, stored_args
from ..replay.tape import Progress, RecipeSource, build_recipe, convert
from ..results.influence import Influence
from ..store import RunStore
from ..store.files import write_tensors
from .pieces import Piece, compute, settle, split_evenly, work_folder

BLOCK = 16  # queries whose sweeps share one replay
NOT_CHECKED = "the replay was not checked against the run (check=False)"
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

    @property
    def precision(self) -> str:
        """The precision by name; "" for that of the recipe."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stored:
    """What a run says of one of its exact results."""

    query: str  # as it was selected
    losses: int  # of which it is the mean
    at: int
    since: int
    precision: str
    replay: str  # how well the recipe reproduced the run
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
    check: bool = True,
    workers: int = 1,
    progress: Progress | None = None,
) -> Influence:
    """The exact influence of every occurrence of the steps on each of the queries; what is not stored is computed, then stored."""
    args = stored_args(store.config, recipe) if args is None else args
    queries = select(store, build_recipe(recipe, args), names, each)
    settle(store)
    known = set(store.tensor_names())
    files = {q.name: result_name(store, q, spec) for q in queries}
    blocks = [[q.name for q in few if files[q.name] not in known] for few in split_evenly(queries, BLOCK, workers)]
    if any(blocks):
        replay = check_replay(store, recipe, args, spec.at, "check") if check else NOT_CHECKED
        pieces = [
            _piece((store.path, recipe, args, block, spec, replay), [files[name] for name in block])
            for block in blocks
            if block
        ]
        compute(store, sweep_block, pieces, workers, recipe, progress)
    return read(store, queries, spec)


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

    def losses(model: nn.Module) -> Tensor:
        dtype = next(model.parameters()).dtype
        return torch.stack([made.loss(model, convert(q.batch, dtype)).mean() for q in block])

    key = digest([result_name(store, q, spec) for q in block])
    result = reverse(
        recipe, losses, args=args, at=spec.at, since=spec.since, dtype=spec.dtype, cache=work, key=key, progress=progress
    )  # fmt: skip
    seconds = (time.perf_counter() - began) / len(block)
    for q, scores in zip(block, result.scores, strict=True):
        about = Stored(q.name, q.count, spec.at, spec.since, spec.precision, replay, round(seconds, 3), result.caveats)
        file = work / f"{result_name(store, q, spec)}.safetensors"
        write_tensors(file, {"scores": scores}, {"about": json.dumps(asdict(about))}, checked=True)


def result_name(store: RunStore, query: Query, spec: Spec) -> str:
    """The name of a result's file: a hash of what decides it."""
    marks = store.config.get("fingerprints", {})
    what = [marks, batch_fingerprint(query.batch), spec.at, spec.since, spec.precision]
    return f"{PREFIX}{digest(what)}"


def stored_results(store: RunStore) -> list[Stored]:
    """The exact results that a run has."""
    names = [name for name in store.tensor_names() if name.startswith(PREFIX)]
    return [_about(store, name) for name in names]


def _about(store: RunStore, name: str) -> Stored:
    about = json.loads(store.tensor_metadata(name)["about"])
    return Stored(**{**about, "caveats": tuple(about["caveats"])})


def read(store: RunStore, queries: Sequence[Query], spec: Spec) -> Influence:
    """Stored results as one, a row for each query."""
    names = [result_name(store, q, spec) for q in queries]
    rows = [store.load_tensors(name)["scores"] for name in names]
    first, last = (store.rows_before(step) for step in (spec.since, spec.at))
    ids, steps = store.occurrences(last)
    if any(row.shape != (last - first,) for row in rows):
        raise StoreError(
            f"an exact result of {store.path} has not one score for each of its {last - first:,} occurrences: it is "
            "damaged, or of another run. Delete its exact-*.safetensors files and compute them again."
        )
    about = [_about(store, name) for name in names]
    caveats = [*dict.fromkeys(x for one in about for x in (one.replay, *one.caveats))]
    if spec.dtype is not None:
        caveats.append(f"computed in {spec.precision}")
    if len(queries) == 1 and queries[0].count > 1:
        caveats.append(f"influence on the mean loss of {queries[0].count} queries")
    if spec.since:
        caveats.append(f"steps {spec.since} to {spec.at - 1} only")
    return Influence(
        torch.stack(rows), ids[first:], steps[first:], store.config.get("ids", "str"), HOW, at=spec.at,
        caveats=(*caveats, "evaluated in eval mode"),
    )  # fmt: skip
