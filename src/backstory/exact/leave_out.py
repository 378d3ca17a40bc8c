r"""Trajectory-specific leave-one-out: retrain without chosen occurrences, all else equal, and subtract.

    TSLOO = ℓ(θ_T without, q) − ℓ(θ_T with, q)           positive: the removed sample helped

The weights of the other samples stay what they were; order, initialisation, schedule and random draws too. A replay
starts from the nearest kept state before the first removed occurrence. Many replays run stacked where the model allows;
the numbers are those of the plain loop, up to rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError
from ..replay.removal import Removal, index, places
from ..replay.tape import Progress, RecipeSource, Tape, own_randomness, thinned
from ..run.processes import spread
from .losses import QueryLoss, QuerySet, losses
from .replicas import Cut, Replicas, at_once, obstacle
from .rows import Rows

WORTH_STACKING = 4  # replicas


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
) -> Tensor:
    """Differences of the query losses, (removals, Q), float64; `recipe` is a function that gives it afresh.

    `query_loss(model)` gives a scalar or (Q,) losses of the trained model; a name is one of the recipe's query sets.
    With `cache`, each row is kept in that folder as soon as it is known, and read by the next call. `workers` > 1 needs
    `recipe` as "package.module:function" (and `args`) and a query that can be imported by name. `vectorised` None stacks
    replays where that works, True insists on it. `dtype` replays in that precision, batches included.
    """
    if workers > 1 and len(removals) > 1:
        return _in_processes(recipe, removals, query_loss, progress, args, cache, workers, vectorised, dtype)
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype)
        found = index(tape.ids)
        cuts = [(places(removal, found), removal.share) for removal in removals]
        tape.record(thinned([min(gone) for gone, _ in cuts], tape.affordable()))
        base = losses(tape.recipe, query_loss)
        rows = Rows(cache, (tape.start, tape.end), base)
        return _all(tape, cuts, query_loss, rows, vectorised, progress)


def _all(
    tape: Tape, cuts: Sequence[Cut], query: QueryLoss, rows: Rows, vectorised: bool | None, progress: Progress | None
) -> Tensor:
    known = {i: row for i, cut in enumerate(cuts) if (row := rows.get(*cut)) is not None}
    todo = sorted((i for i in range(len(cuts)) if i not in known), key=lambda i: min(cuts[i][0]))
    size = _stack_size(tape, [cuts[i] for i in todo], vectorised)
    for done in range(len(known)):
        _tell(progress, done + 1, len(cuts))
    for k in range(0, len(todo), size):
        part = todo[k : k + size]
        for i, found in zip(part, _replayed(tape, [cuts[i] for i in part], query), strict=True):
            known[i] = found - rows.base
            rows.put(*cuts[i], known[i])
            _tell(progress, len(known), len(cuts))
    out = [known[i] for i in range(len(cuts))]
    return torch.stack(out) if out else torch.zeros(0, len(rows.base), dtype=torch.float64)


def _stack_size(tape: Tape, cuts: Sequence[Cut], vectorised: bool | None) -> int:
    """How many replays to stack; 1 for the plain loop."""
    if vectorised is False or not cuts or (vectorised is None and len(cuts) < WORTH_STACKING):
        return 1
    tape.rewind(0 if 0 in tape.states else min(tape.states))
    size = min(at_once(tape), len(cuts))
    if vectorised is None and size < WORTH_STACKING:
        return 1
    reason = obstacle(tape, cuts[0], min(cuts[0][0]))
    if reason is None:
        return max(size, 2)
    if vectorised:
        raise UnsupportedError(f"the replays cannot be stacked: {reason}. Pass vectorised=False, or workers=.")
    return 1


def _replayed(tape: Tape, cuts: Sequence[Cut], query: QueryLoss) -> Iterator[Tensor]:
    """Query losses (Q,) after each removal, one by one or stacked."""
    start = tape.rewind(min(min(gone) for gone, _ in cuts))
    if len(cuts) == 1:
        gone, share = cuts[0]
        for t in range(start, tape.length):
            tape.step(t, tape.without(t, gone, share))
        yield losses(tape.recipe, query)
        return
    stack = Replicas(tape, cuts)
    for t in range(start, tape.length):
        stack.step(t)
    for r in range(len(cuts)):
        tape.load(stack.theta(r))
        yield losses(tape.recipe, query)


def _in_processes(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query: QueryLoss,
    progress: Progress | None,
    args: Mapping[str, Any] | None,
    cache: Path | None,
    workers: int,
    vectorised: bool | None,
    dtype: torch.dtype | None,
) -> Tensor:
    _check_importable(recipe, query)
    count = min(len(removals), 2 * workers)
    pieces = [list(range(k, len(removals), count)) for k in range(count)]
    jobs = [
        (recipe, [removals[i] for i in piece], query, dict(args or {}), cache, vectorised, dtype) for piece in pieces
    ]
    found: dict[int, Tensor] = {}
    for k, rows in spread(_piece, jobs, workers):
        found.update(zip(pieces[k], torch.tensor(rows, dtype=torch.float64), strict=True))
        _tell(progress, len(found), len(removals))
    return torch.stack([found[i] for i in range(len(removals))])


def _piece(
    recipe: str,
    removals: Sequence[Removal],
    query: QueryLoss,
    args: Mapping[str, Any],
    cache: Path | None,
    vectorised: bool | None,
    dtype: torch.dtype | None,
) -> list[list[float]]:
    """What one worker does."""
    found = leave_out(recipe, removals, query, args=args, cache=cache, vectorised=vectorised, dtype=dtype)
    return [[float(x) for x in row] for row in found]


def _check_importable(recipe: RecipeSource, query: QueryLoss) -> None:
    if not isinstance(recipe, str):
        raise UsageError("workers > 1 imports the recipe in each process: give it as 'package.module:function'.")
    if not isinstance(query, str | QuerySet) and "<" in getattr(query, "__qualname__", "<"):
        raise UsageError(
            "workers > 1 needs a query that other processes can import: the name of one of the recipe's query sets, "
            "backstory.exact.QuerySet, or a function of a module."
        )


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
