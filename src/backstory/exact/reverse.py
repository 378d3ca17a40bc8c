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

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture.ids import as_text
from ..errors import BackstoryError, MismatchError, NumericalError, UnsupportedError, UsageError
from ..replay import update
from ..replay.reproduction import reproduction
from ..replay.tape import Progress, RecipeSource, Tape, own_randomness, tell
from ..results.influence import Influence
from ..results.origin import EXACT
from ..store.run_store import HasPath, RunStore
from .cache import ProgressFile, digest
from .derivative import State, Update, check_taken, flat, pull, spans_of, split, take
from .losses import QueryLoss, StepGradient, gradients, losses, step_gradient
from .states import States, affordable, flat_state

HOW = EXACT
SAVES = 16  # times that a sweep is saved on its way
QUERY = " query"  # a name that no recipe gives
STATISTICS = (
    "running statistics of the model (such as BatchNorm's) are treated as constants: their derivative is not included"
)


def reverse(
    recipe: RecipeSource,
    query_loss: QueryLoss,
    *,
    args: Mapping[str, Any] | None = None,
    at: int | None = None,
    since: int = 0,
    dtype: torch.dtype | None = torch.float64,
    segments: int | None = None,
    cache: Path | None = None,
    key: str | None = None,
    run: RunStore | None = None,
    progress: Progress | None = None,
) -> Influence:
    """The exact first-order influence of every occurrence from step `since` to before `at` (default: all) on the queries.

    `query_loss` is as in `leave_out`. States wait on disk, before every step if it has the room; else, or with `segments`, the run is
    replayed once more in so many segments. With `cache`, the sweep is saved on its way, and a second call continues from there or
    reads the result: one with the same `key`, by default the bits of the weights and of the query losses. With `run`, the replay
    follows its recording: learning rates, random states, and the whole state at stored checkpoints.
    """
    with own_randomness(), closing(States()) as whole, closing(States()) as states:
        tape = Tape(recipe, args=args, dtype=dtype, length=at, states=whole, run=run)
        if tape.obstacle is not None:
            raise UnsupportedError(f"{HOW} differentiates the optimizer's steps, but {tape.obstacle}.")
        if not 0 <= since < tape.length:
            raise UsageError(f"since must be between 0 and {tape.length - 1}, got {since}.")
        bounds = boundaries(since, tape.length, segments, affordable(flat_state(update.slots(tape.optimizer))))
        sweep = Sweep(tape, bounds, states)
        caveats = sweep.forward()
        x, base = sweep.start(query_loss)
        key = key or digest({"run": [tape.start, tape.end], "base": base.tolist(), "since": since})
        file = ProgressFile(cache, f"reverse-{key}")
        scores = sweep.back(x, file, progress)
    ids = tape.ids[since:]
    names, kind = as_text([name for part in ids for name in part])
    steps = np.repeat(np.arange(since, tape.length), [len(part) for part in ids])
    return Influence(scores, np.array(names), steps, kind, HOW, at=tape.length, caveats=caveats)


class Sweep:
    """One way forward over a run, and one back; states lie on disk in between."""

    def __init__(self, tape: Tape, bounds: Sequence[int], states: States) -> None:
        self.tape, self.bounds, self.states = tape, list(bounds), states
        self._shapes = [p.shape for p in tape.parameters]
        self._sizes = [p.numel() for p in tape.parameters]
        self._later = -1, torch.empty(0)  # the step that was differentiated last, and θ before it

    def forward(self) -> tuple[str, ...]:
        """Play the run; states before the steps of the last segment, and at the beginning of the others. Returns caveats."""
        before = _buffers(self.tape)
        self.tape.record(self.bounds[:-1], watch=self._keep)
        self.tape.optimizer.zero_grad()  # frees the gradients
        return () if all(map(torch.equal, before, _buffers(self.tape))) else (STATISTICS,)

    def _keep(self, t: int) -> None:
        if t >= self.bounds[-1]:
            self.states[t] = flat_state(update.slots(self.tape.optimizer, copy=False))

    def start(self, query: QueryLoss) -> tuple[State, Tensor]:
        """The adjoint after the last step, (Q, n) each, and the query losses (Q,)."""
        v = torch.stack([flat(row) for row in gradients(self.tape.recipe, query, self.tape.parameters)])
        return State(v, torch.zeros_like(v), torch.zeros_like(v)), losses(self.tape.recipe, query)

    def back(self, x: State, file: ProgressFile, progress: Progress | None) -> Tensor:
        """Scores (Q, N) of all occurrences: the adjoint goes back over one step after the other."""
        first, end = self.bounds[0], self.tape.length
        places = np.cumsum([0, *(len(ids) for ids in self.tape.ids[first:])])
        scores = torch.zeros(len(x.theta), int(places[-1]), dtype=torch.float64)
        done, x, scores = file.load() or (end, x, scores)
        every = -(-(end - first) // SAVES)
        for t in range(done - 1, first - 1, -1):
            rows, x = self._step_back(t, x)
            scores[:, places[t - first] : places[t - first + 1]] = rows.double()
            if (t - first) % every == 0:
                if not bool(scores.isfinite().all()):
                    raise NumericalError(f"the derivative overflowed after step {t}. Compute it in float64.")
                file.save(t, x, scores)
            tell(progress, end - t, end - first)
        return scores

    def _step_back(self, t: int, x: State) -> tuple[Tensor, State]:
        """`(scores (Q, B) of the step's occurrences, the adjoint before it)`; before the first step no adjoint is needed."""
        w = self.tape.weights(t)
        step, gradient = self._taken(t, w)
        x, r = pull(self.followed(step), x)
        del step  # what it holds is not needed beside the products, which take most memory
        if t == self.bounds[0]:
            dots = torch.stack([gradient.along(split(one, self._shapes)) for one in r])
            return -w.to(dots) * dots, x
        out = []
        for theta, one in zip(x.theta, r, strict=True):
            dots, turned = self.products(t, gradient, split(one, self._shapes))
            for part, change in zip(split(theta, self._shapes), turned, strict=True):
                part += change
            out.append(-w.to(dots) * dots)
        return torch.stack(out), x

    def _taken(self, t: int, w: Tensor) -> tuple[Update, StepGradient]:
        """Step t as the run took it, and its gradient."""
        tape, now = self.tape, self._state(t)
        tape.load(tuple(split(now.theta, self._shapes)))
        gradient = step_gradient(lambda: tape.losses(t), w, tape.parameters)
        step = take(now, flat(gradient.grads), spans_of(self._sizes, tape.coefficients[t]), tape.recipe.clip_norm)
        if t + 1 not in tape.anchored:  # there the run's own state follows, not the one that this step leads to
            after = self._later[1] if self._later[0] == t + 1 else self._state(t + 1).theta
            check_taken(step.after.theta, after, now.theta, t)
        self._later = t, now.theta
        return step, gradient

    def followed(self, step: Update) -> Update:
        """The update as it is differentiated: all of it; a study may leave parts out."""
        return step

    def products(self, t: int, gradient: StepGradient, r: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`(⟨∇ℓ_z, r⟩ (B,), H r)` with the true Hessian of step t; a study may take another curvature."""
        return gradient.pull(r)

    def _state(self, t: int) -> State:
        """The state before step t; its segment is replayed where it is not there."""
        if t not in self.states:
            end = min(b for b in [*self.bounds[1:], self.tape.length] if b > t)
            self.states.clear()
            for step in range(self.tape.rewind(t), end):
                self.states[step] = flat_state(update.slots(self.tape.optimizer, copy=False))
                self.tape.step(step)
            self.states[end] = flat_state(update.slots(self.tape.optimizer, copy=False))
            self.tape.optimizer.zero_grad()
        state: State = self.states[t]
        return state


def _buffers(tape: Tape) -> list[Tensor]:
    return [b.detach().clone() for b in tape.recipe.model.buffers() if b.is_floating_point()]


def boundaries(since: int, end: int, count: int | None, most: int) -> list[int]:
    """First steps of `count` equal segments; by default of as few as have at most `most` states each, and beginnings with them."""
    if count is not None and count < 1:
        raise UsageError(f"segments must be at least 1, got {count}.")
    steps = end - since
    chosen = (
        next(k for k in range(1, steps + 1) if -(-steps // k) + k <= most or k * k >= steps) if count is None else count
    )
    chosen = min(chosen, steps)
    return [since + i * steps // chosen for i in range(chosen)]


def check_replay(
    run: HasPath,
    recipe: RecipeSource,
    args: Mapping[str, Any] | None,
    step: int,
    *,
    check: bool = True,
    option: str = "check",
) -> str:
    """How well the recipe reproduces the run up to `step`, in words; raises where it does not, naming the option that goes on all the same.

    With `check=False` nothing is raised: the words then say at which step the replay leaves the run, by how much, and where it starts anew.
    """
    try:
        result = reproduction(run, recipe, args=args, until=step, stop=check)
    except BackstoryError as error:
        if check:
            raise
        return f"the replay could not be compared with the run ({error})"
    if check and not result:
        raise MismatchError(f"{result}. To use the recipe anyway, pass {option}=False.")
    return str(result)
