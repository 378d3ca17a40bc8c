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


def leave_out(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query_loss: QueryLoss,
    progress: Progress | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    workers: int = 1,
    vectorised: bool | None = None,
    dtype: torch.dtype | None = None,
    run: RunStore | None = None,
) -> Tensor:
    """Retrain without each removal: differences of the query losses (removals, Q), float64.

    `recipe` is a function that returns a new recipe. `query_loss(model)` returns a scalar or (Q,) losses of the trained model;
    a string names one of the recipe's query sets. With `cache`, each result is stored in that folder as soon as it is known
    and reused by the next call. `workers` > 1 needs `recipe` as "package.module:function" (and `args`) and a query that can
    be imported by name. `vectorised=None` runs several replays at once (torch.func) if that works; True requires it. `dtype`
    replays in that precision, batches included. With `run`, the replay follows its recording, up to the first removed step.
    """
    if workers > 1 and len(removals) > 1:
        options = {"args": args, "cache": cache, "vectorised": vectorised, "dtype": dtype, "run": run and run.path}
        return _in_processes(recipe, removals, query_loss, progress, workers, options)
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, run=run)
        occurrences = index(tape.ids)
        variants = [Variant(places(removal, occurrences), removal.share) for removal in removals]
        tape.let_go(min((v.first for v in variants), default=tape.length))
        tape.record(thin_out([v.first for v in variants], tape.affordable()))
        base = losses(tape.recipe, query_loss)
        rows = Rows(cache, (tape.start, tape.end), base)
        return _all(tape, variants, query_loss, rows, vectorised, progress)


def _all(
    tape: Tape,
    variants: Sequence[Variant],
    query: QueryLoss,
    rows: Rows,
    vectorised: bool | None,
    progress: Progress | None,
) -> Tensor:
    known = {i: row for i, v in enumerate(variants) if (row := rows.get(v.out, v.share)) is not None}
    for done in range(len(known)):
        tell(progress, done + 1, len(variants))
    todo = [i for i in range(len(variants)) if i not in known]
    for stack in stacks(tape, [variants[i] for i in todo], vectorised):
        part = [todo[k] for k in stack]
        for i, after in zip(part, _losses_after(tape, [variants[i] for i in part], query), strict=True):
            known[i] = after - rows.base
            rows.put(variants[i].out, variants[i].share, known[i])
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
    removals: Sequence[Removal],
    query: QueryLoss,
    progress: Progress | None,
    workers: int,
    options: Mapping[str, Any],
) -> Tensor:
    _check_importable(recipe, query)
    count = min(len(removals), 2 * workers)
    pieces = [list(range(k, len(removals), count)) for k in range(count)]
    jobs = [(recipe, [removals[i] for i in piece], query, options) for piece in pieces]
    rows: dict[int, Tensor] = {}
    for k, piece_rows in spread(_piece, jobs, workers):
        rows.update(zip(pieces[k], torch.tensor(piece_rows, dtype=torch.float64), strict=True))
        tell(progress, len(rows), len(removals))
    return torch.stack([rows[i] for i in range(len(removals))])


def _piece(recipe: str, removals: Sequence[Removal], query: QueryLoss, options: Mapping[str, Any]) -> list[list[float]]:
    """What one worker does."""
    run = None if options["run"] is None else RunStore.open(options["run"])
    return [[float(x) for x in row] for row in leave_out(recipe, removals, query, **{**options, "run": run})]


def _check_importable(recipe: RecipeSource, query: QueryLoss) -> None:
    if not isinstance(recipe, str):
        raise UsageError("workers > 1 imports the recipe in each process. Pass it as 'package.module:function'.")
    if not isinstance(query, str | QuerySet) and "<" in getattr(query, "__qualname__", "<"):
        raise UsageError(
            "workers > 1 needs a query that other processes can import. Pass the name of one of the recipe's query "
            "sets, a backstory.exact.QuerySet, or a module-level function."
        )
