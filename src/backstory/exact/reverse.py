r"""Exact unrolling: the derivative of a query's loss through every step of training, θ, m, v and clipping included.

    influence of z at t = −w_z ∂ℓ(θ_T, q)/∂w_{z,t}

by reverse mode. With x = ∂ℓ/∂(θ, m, v) after a step, and s what the update's own derivative makes of it for the
gradient (clipping included), one step back is

    influence = −w_z ⟨∇ℓ(θ_t, z), s⟩          x_θ ← ∂(update)/∂θ + H_t s          x_m, x_v ← ∂(update)/∂m, v

with the true Hessian of the step's loss. This is the ceiling of every first-order method: what remains between it and
retraining is of second order, or kinks. The price is a few training runs for each query, less when they are batched.
About √T states are kept, and one segment between two of them is replayed once more at a time, so that memory holds 2√T states.

Assumes: an optimizer of `replay.update`; running statistics (batch norm) as they were: the result says so.
Shapes:  Q queries, N occurrences in all, T steps; about 10 Q times the model in memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..capture.ids import as_text
from ..errors import MismatchError, NumericalError, UnsupportedError, UsageError
from ..replay import update
from ..replay.recipe import Recipe, stored_args
from ..replay.reproduction import reproduction
from ..replay.tape import Progress, RecipeSource, Tape, build_recipe, own_randomness, tell
from ..replay.update import Slots, distance
from ..results.influence import Influence
from ..run.run import Run
from .cache import ProgressFile
from .losses import QueryLoss, batched_grad, gradients, losses, or_zeros, step_gradient

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # of the step's own displacement
HOW = "exact unrolling"
QUERY = " query"  # a name that no recipe gives
STATISTICS = (
    "running statistics of the model (such as BatchNorm's) are treated as constants: their derivative is not included"
)


class Moment(NamedTuple):
    """One step with the state before and after it."""

    step: int
    before: Slots
    after: Slots


def reverse(
    recipe: RecipeSource,
    query_loss: QueryLoss,
    *,
    args: Mapping[str, Any] | None = None,
    at: int | None = None,
    dtype: torch.dtype | None = torch.float64,
    checkpoints: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Influence:
    """The exact first-order influence of every occurrence in the first `at` steps (default: all) on the queries.

    `query_loss` is as in `leave_out`; `checkpoints` is the number of states held in memory (default about √T). With `cache`, the
    sweep is saved at each of them, and a second call continues from there or reads the result.
    """
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, length=at)
        if tape.obstacle is not None:
            raise UnsupportedError(f"{HOW} differentiates the optimizer's steps, but {tape.obstacle}.")
        bounds = boundaries(tape.length, checkpoints)
        buffers = _buffers(tape)
        tape.record(bounds)
        caveats = () if all(map(torch.equal, buffers, _buffers(tape))) else (STATISTICS,)
        x, base = _start(tape, query_loss)
        file = ProgressFile(cache, "reverse", (tape.start, tape.end), base, bounds)
        scores = _sweep(tape, x, bounds, file, progress)
    names, kind = as_text([name for ids in tape.ids for name in ids])
    steps = np.repeat(np.arange(tape.length), [len(ids) for ids in tape.ids])
    return Influence(scores, np.array(names), steps, kind, HOW, at=tape.length, caveats=tuple(caveats))


def _start(tape: Tape, query: QueryLoss) -> tuple[Slots, Tensor]:
    """The adjoint after the last step, Q in front, and the query losses (Q,)."""
    v = gradients(tape.recipe, query, tape.parameters)
    now = update.slots(tape.optimizer)
    m, second = (tuple(torch.zeros(len(v[0]), *s.shape).to(s) for s in part) for part in (now.m, now.v))
    return Slots(tuple(v), m, second), losses(tape.recipe, query)


def _sweep(tape: Tape, x: Slots, bounds: Sequence[int], file: ProgressFile, progress: Progress | None) -> Tensor:
    """Scores (Q, N) of all occurrences: the adjoint goes back over one step after the other."""
    places = np.cumsum([0, *(len(ids) for ids in tape.ids)])
    scores = torch.zeros(len(x.theta[0]), int(places[-1]), dtype=torch.float64)
    done, x, scores = file.load() or (tape.length, x, scores)
    for first, end in segments(bounds, tape.length):
        if first >= done:
            continue
        for moment in backward(tape, first, end):
            t = moment.step
            rows, x = _back(tape, moment, x)
            scores[:, places[t] : places[t + 1]] = rows.double()
            tell(progress, tape.length - t, tape.length)
        if not bool(scores.isfinite().all()):
            raise NumericalError(f"the derivative overflowed between steps {first} and {end}. Compute it in float64.")
        file.save(first, x, scores)
    return scores


def _back(tape: Tape, moment: Moment, x: Slots) -> tuple[Tensor, Slots]:
    t, now = moment.step, moment.before
    tape.load(now.theta)
    w = tape.weights(t)
    gradient = step_gradient(lambda: tape.losses(t), w, tape.parameters)
    leaves = [tuple(y.detach().requires_grad_() for y in part) for part in (*now, gradient.grads)]
    with torch.enable_grad():
        after = update.update(Slots(*leaves[:3]), leaves[3], tape.coefficients[t], tape.recipe.clip_norm)
    _check(after, moment, t)
    x_theta, x_m, x_v, s = _pulled(after, leaves, x)
    dots, turned = gradient.pull(s)
    x_theta = tuple(a + b for a, b in zip(x_theta, turned, strict=True))
    return -w.to(dots) * dots, Slots(x_theta, x_m, x_v)


def _pulled(after: Slots, leaves: Sequence[tuple[Tensor, ...]], x: Slots) -> list[tuple[Tensor, ...]]:
    """The adjoint before the update's own arithmetic: of θ, m, v and the gradient."""
    flat = [y for part in leaves for y in part]
    rows = batched_grad([y for part in after for y in part], flat, [y for part in x for y in part])
    known, k = or_zeros(rows, flat, len(x.theta[0])), len(leaves[0])
    return [tuple(known[i * k : (i + 1) * k]) for i in range(4)]


def _check(after: Slots, moment: Moment, t: int) -> None:
    """The step that is differentiated must be the step that torch took."""
    wrong = distance(after.theta, moment.after.theta)
    size = distance(moment.after.theta, moment.before.theta)
    if wrong > TOLERANCE.get(after.theta[0].dtype, 1e-1) * size + 1e-300:
        raise NumericalError(
            f"step {t} as differentiated differs from the step that the optimizer took by "
            f"{wrong / max(size, 1e-300):.1e} of its length. Check that every trained parameter gets a gradient in "
            "each step, and that the loss depends only on the model, the batch and torch's generator."
        )


def _buffers(tape: Tape) -> list[Tensor]:
    return [b.detach().clone() for b in tape.recipe.model.buffers() if b.is_floating_point()]


def boundaries(steps: int, count: int | None) -> list[int]:
    """First steps of `count` equal segments (about √T by default)."""
    if count is not None and count < 1:
        raise UsageError(f"checkpoints must be at least 1, got {count}.")
    chosen = min(count or math.isqrt(max(steps - 1, 0)) + 1, steps)
    return [i * steps // chosen for i in range(chosen)]


def segments(bounds: Sequence[int], end: int) -> list[tuple[int, int]]:
    """`(first step, one past the last)` of each segment, last segment first."""
    return list(zip(bounds, [*bounds[1:], end], strict=True))[::-1]


def backward(tape: Tape, first: int, end: int) -> Iterator[Moment]:
    """The steps of one segment, last first; the state before `first` must be kept."""
    start = tape.rewind(first)
    states = [update.slots(tape.optimizer)]
    for t in range(start, end):
        tape.step(t)
        states.append(update.slots(tape.optimizer))
    for t in range(end - 1, start - 1, -1):
        yield Moment(t, states[t - start], states[t - start + 1])


def query(
    run: Run,
    recipe: RecipeSource,
    batch: Any,
    at: int | str = "final",
    *,
    args: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    check: bool = True,
    checkpoints: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Influence:
    """The influence of every occurrence before `at` on the recipe's losses of `batch`: one query for each loss.

    The recipe is replayed first, and must reproduce the run's stored weights, bit for bit or up to rounding
    (`check=False` skips this and adds a caveat). Then it is unrolled in `dtype`. If the recipe is the one named in the run,
    `args` default to the run's.
    """
    step = run.step_of(at)
    args = stored_args(run.config, recipe) if args is None else args
    caveats = [
        check_replay(run, recipe, args, step, "check")
        if check
        else "the replay was not checked against the run (check=False)"
    ]

    def with_query() -> Recipe:
        made = build_recipe(recipe, args)
        return replace(made, queries={**made.queries, QUERY: batch})

    options: dict[str, Any] = {"dtype": dtype, "checkpoints": checkpoints, "cache": cache, "progress": progress}
    influence = reverse(with_query, QUERY, at=step, **options)
    if dtype is not None:
        caveats.append(f"unrolled in {str(dtype).removeprefix('torch.')}")
    return replace(influence, caveats=(*caveats, *influence.caveats, "evaluated in eval mode"), lookup=run.content)


def check_replay(run: Run, recipe: RecipeSource, args: Mapping[str, Any] | None, step: int, option: str) -> str:
    """How well the recipe reproduces the run's stored weights up to `step`, in words; raises where it does not, naming the option that skips this."""
    result = reproduction(run, recipe, args=args, until=step)
    if not result:
        raise MismatchError(f"{result}. To use the recipe anyway, pass {option}=False.")
    return str(result)
