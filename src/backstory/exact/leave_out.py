r"""Trajectory-specific leave-one-out: retrain without chosen occurrences, all else equal, and subtract.

    TSLOO = ℓ(θ_T without, q) − ℓ(θ_T with, q)           positive: the removed sample helped

The weights of the other samples stay what they were; order, initialisation, schedule and random draws too. A replay
starts from the nearest kept state before the first removed occurrence. Many replays run stacked where the model allows (`variants`).

Shapes:  Q queries.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..replay.tape import (
    Progress,
    RecipeSource,
    Removal,
    Tape,
    index,
    own_randomness,
    places,
    tell,
    thin_out,
)
from ..store import RunStore
from ..workers import spread
from .cache import Rows
from .losses import QueryLoss, QuerySet, losses
from .variants import Variant, stacks, train_variants

Job = Removal | int  # what is left out, or the seed of a twin


def leave_out(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query_loss: QueryLoss,
    progress: Progress | None = None,
    **options: Any,
) -> Tensor:
    """Retrain without each removal: differences of the query losses (removals, Q), float64. Arguments are those of `retrain`."""
    return retrain(recipe, removals, query_loss, progress, **options)[0]


def retrain(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query_loss: QueryLoss,
    progress: Progress | None = None,
    *,
    twins: int = 0,
    args: Mapping[str, Any] | None = None,
    at: int | None = None,
    cache: Path | None = None,
    workers: int = 1,
    vectorised: bool | None = None,
    dtype: torch.dtype | None = None,
    run: RunStore | None = None,
) -> tuple[Tensor, Tensor]:
    """Retrain without each removal, and `twins` times from weights one rounding unit away: differences of the query losses, float64.

    Returns `(removals, Q)` and `(twins, Q)`. `recipe` is a function that returns a new recipe. `query_loss(model)` returns a scalar or (Q,)
    losses of the trained model, or of the model before step `at`; a string names one of the recipe's query sets. With `cache`, each result
    is stored in that folder as soon as it is known and reused by the next call. `workers` > 1 needs `recipe` as
    "package.module:function" (and `args`) and a query that can be imported by name. `vectorised=None` runs several replays at once
    (torch.func) if that works; True requires it. `dtype` replays in that precision, batches included. With `run`, the replay
    follows its recording, up to the first removed step.
    """
    jobs: list[Job] = [*removals, *range(twins)]
    if workers > 1 and len(jobs) > 1:
        options = {
            "args": args,
            "at": at,
            "cache": cache,
            "vectorised": vectorised,
            "dtype": dtype,
            "run": run and run.path,
        }
        rows = _in_processes(recipe, jobs, query_loss, progress, workers, options)
    else:
        rows = _here(recipe, jobs, query_loss, progress, args, at, cache, vectorised, dtype, run)
    return rows[: len(removals)], rows[len(removals) :]


def _here(
    recipe: RecipeSource,
    jobs: Sequence[Job],
    query_loss: QueryLoss,
    progress: Progress | None,
    args: Mapping[str, Any] | None,
    at: int | None,
    cache: Path | None,
    vectorised: bool | None,
    dtype: torch.dtype | None,
    run: RunStore | None,
) -> Tensor:
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, length=at, run=run)
        occurrences = index(tape.ids[: tape.length])
        variants = [_variant(job, occurrences) for job in jobs]
        tape.let_go(min((v.first for v in variants), default=tape.length))
        tape.record(thin_out([v.first for v in variants], tape.affordable()))
        base = losses(tape.recipe, query_loss)
        rows = Rows(cache, (tape.start, tape.end), base)
        return _all(tape, variants, query_loss, rows, vectorised, progress)


def _variant(job: Job, occurrences: dict[Any, list[tuple[int, int]]]) -> Variant:
    return Variant(twin=job) if isinstance(job, int) else Variant(places(job, occurrences), job.share)


def _all(
    tape: Tape,
    variants: Sequence[Variant],
    query: QueryLoss,
    rows: Rows,
    vectorised: bool | None,
    progress: Progress | None,
) -> Tensor:
    known = {i: row for i, v in enumerate(variants) if (row := rows.get(v.out, v.share, v.twin)) is not None}
    for done in range(len(known)):
        tell(progress, done + 1, len(variants))
    todo = [i for i in range(len(variants)) if i not in known]
    for stack in stacks(tape, [variants[i] for i in todo], vectorised):
        part = [todo[k] for k in stack]
        for i, after in zip(part, _losses_after(tape, [variants[i] for i in part], query), strict=True):
            known[i] = after - rows.base
            rows.put(variants[i].out, variants[i].share, variants[i].twin, known[i])
            tell(progress, len(known), len(variants))
    out = [known[i] for i in range(len(variants))]
    return torch.stack(out) if out else torch.zeros(0, len(rows.base), dtype=torch.float64)


def _losses_after(tape: Tape, variants: Sequence[Variant], query: QueryLoss) -> list[Tensor]:
    """Query losses (Q,) after each variant."""
    out: list[Tensor] = []
    train_variants(tape, variants, {tape.length}, lambda i, t: out.append(losses(tape.recipe, query)))
    return out


def _in_processes(
    recipe: RecipeSource,
    jobs: Sequence[Job],
    query: QueryLoss,
    progress: Progress | None,
    workers: int,
    options: Mapping[str, Any],
) -> Tensor:
    _check_importable(recipe, query)
    count = min(len(jobs), 2 * workers)
    pieces = [list(range(k, len(jobs), count)) for k in range(count)]
    work = [(recipe, [jobs[i] for i in piece], query, options) for piece in pieces]
    rows: dict[int, Tensor] = {}
    for k, piece_rows in spread(_piece, work, workers):
        rows.update(zip(pieces[k], torch.tensor(piece_rows, dtype=torch.float64), strict=True))
        tell(progress, len(rows), len(jobs))
    return torch.stack([rows[i] for i in range(len(jobs))])


def _piece(recipe: str, jobs: Sequence[Job], query: QueryLoss, options: Mapping[str, Any]) -> list[list[float]]:
    """What one worker does."""
    run = None if options["run"] is None else RunStore.open(options["run"])
    rows = _here(recipe, jobs, query, None, **{**options, "run": run})
    return [[float(x) for x in row] for row in rows]


def _check_importable(recipe: RecipeSource, query: QueryLoss) -> None:
    if not isinstance(recipe, str):
        raise UsageError("workers > 1 imports the recipe in each process. Pass it as 'package.module:function'.")
    if not isinstance(query, str | QuerySet | tuple) and "<" in getattr(query, "__qualname__", "<"):
        raise UsageError(
            "workers > 1 needs a query that other processes can import. Pass the name of one of the recipe's query "
            "sets, a backstory.exact.QuerySet, or a module-level function."
        )
