r"""Tangents: how the weights of the model change as the weight of a group of occurrences is lowered. Forward mode, exact to first order.

Let w_z → (1−ε) w_z for the occurrences of a group S. With ẋ = dx/dε, at every step

    ġ = H_t θ̇_t − Σ_{z ∈ S_t} w_z ∇ℓ(θ_t, z)          the Hessian-vector product of the step's own batch
    (θ̇, ṁ, v̇)_{t+1} = ∂(clip, update) · (ġ, θ̇, ṁ, v̇)_t

and θ̇_T is the data value embedding of S in full coordinates: its influence on any query is ⟨∇ℓ(θ_T, q), θ̇_T⟩, and on the model before
step t ⟨∇ℓ(θ_t, q), θ̇_t⟩. Tangents of groups add up. A tangent begins at its group's first step. A sample that is moved is left out of
its own step, and its gradient is added at another, with the weight that it had.

Shapes:  G groups, n numbers in all parameters.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NumericalError, UnsupportedError, UsageError
from ..replay import update
from ..replay.queries import sample
from ..replay.tape import Places, Progress, RecipeSource, Tape, own_randomness
from ..store import RunStore
from .cache import ProgressFile
from .derivative import State, check_taken, flat, push, spans_of, split, take
from .losses import StepGradient, or_zeros, step_gradient
from .states import flat_state

HOW = "exact tangents"
Moved = tuple[Any, Tensor]  # the batch of one sample, and its weight
SAVES = 8  # times that tangents are saved on their way


@dataclass(frozen=True)
class Group:
    """Occurrences that are left out, and occurrences that are put in at a step: its batch has them too, with the weight they had."""

    out: Places = field(default_factory=dict)
    into: Mapping[int, Sequence[tuple[int, int]]] = field(
        default_factory=dict
    )  # step -> (step, position) of occurrences

    def concerns(self, step: int) -> bool:
        """Whether the group changes this step."""
        return step in self.out or step in self.into


def tangent(
    recipe: RecipeSource,
    groups: Sequence[Group],
    steps: Collection[int] | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = torch.float64,
    run: RunStore | None = None,
    cache: Path | None = None,
    key: str = "",
    progress: Progress | None = None,
) -> dict[int, Tensor]:
    """θ̇ (G, n) of the groups before each of these steps (default: after the last), the parameters in the optimizer's order.

    With `cache`, what is computed is saved on the way, and a second call with the same `key` continues from there.
    """
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, run=run)
        wanted = sorted({tape.length} if steps is None else set(steps))
        if not wanted or not 0 <= wanted[0] <= wanted[-1] <= tape.length:
            raise UsageError(
                f"steps must be between 0 and {tape.length}, the number of steps of the recipe, got {steps}."
            )
        tape.length = max(1, wanted[-1])
        carried = Tangents(tape, groups)
        if ahead := carried.ahead():
            first = Tape(recipe, args=args, dtype=dtype, length=max(ahead)[0] + 1, run=run)
            carried.moved = fetch(first, ahead, _part(progress, 0, first.length + tape.length))
            progress = _part(progress, first.length, first.length + tape.length)
        file = ProgressFile(cache, f"tangent-{key}")
        done, out = carried.resume(file, wanted)
        every = -(-tape.length // SAVES)

        def watch(t: int) -> None:
            if t < done:
                return
            carried.check(t)
            if t in wanted:
                out[t] = carried.theta()
            if t % every == 0 and t > done:
                file.save(t, carried.stacked(), carried.rows(out))
            if t < tape.length:
                carried.over(t)

        tape.record((), progress, watch)
    return out


def fetch(
    tape: Tape, occurrences: Collection[tuple[int, int]], progress: Progress | None
) -> dict[tuple[int, int], Moved]:
    """Occurrences `(step, position)` as the run had them, by a replay: their batch may depend on random draws."""
    out: dict[tuple[int, int], Moved] = {}

    def watch(t: int) -> None:
        out.update({(step, i): _occurrence(tape, step, i) for step, i in occurrences if step == t})

    tape.record((), progress, watch)
    return out


def _occurrence(tape: Tape, step: int, position: int) -> Moved:
    return sample(tape.recipe.batches[step][1], position), tape.weights(step)[position]


def _part(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Progress of one of several replays."""
    return None if progress is None else lambda a, _: progress(done + a, total)


@contextmanager
def _same_statistics(model: nn.Module) -> Iterator[None]:
    """Forward passes inside leave the model's running statistics as they were."""
    before = [b.clone() for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for b, old in zip(model.buffers(), before, strict=True):
                b.copy_(old)


class Tangents:
    """The tangents of G groups beside a training."""

    def __init__(self, tape: Tape, groups: Sequence[Group]) -> None:
        if tape.obstacle is not None:
            raise UnsupportedError(f"{HOW} differentiate the optimizer's steps, but {tape.obstacle}.")
        self.tape, self.groups = tape, groups
        self._shapes = [p.shape for p in tape.parameters]
        self._sizes = [p.numel() for p in tape.parameters]
        self.states: dict[int, State] = {}  # of the groups that have begun
        self.moved: dict[tuple[int, int], Moved] = {}  # occurrences that were fetched before
        self._last: tuple[int, Tensor, Tensor] | None = (
            None  # the step that was differentiated last, θ after and before it
        )

    def theta(self) -> Tensor:
        """θ̇ (G, n) before the step where the training stands."""
        none = flat([torch.zeros_like(p) for p in self.tape.parameters])
        return torch.stack([self.states[i].theta if i in self.states else none for i in range(len(self.groups))])

    def rows(self, done: Mapping[int, Tensor]) -> Tensor:
        """θ̇ at the steps that are done, (steps, G, n)."""
        return torch.stack([*done.values()]) if done else self.theta()[None][:0]

    def stacked(self) -> State:
        """(θ̇, ṁ, v̇), (G, n) each; zeros for groups that have not begun."""
        none = flat([torch.zeros_like(p) for p in self.tape.parameters])
        states = [self.states.get(i, State(none, none, none)) for i in range(len(self.groups))]
        return State(*(torch.stack(part) for part in zip(*states, strict=True)))

    def resume(self, file: ProgressFile, wanted: Sequence[int]) -> tuple[int, dict[int, Tensor]]:
        """`(the step from which to go on, θ̇ at the steps that are done)`, from what was saved."""
        saved = file.load()
        if saved is None:
            return 0, {}
        step, x, rows = saved
        first = [min((*group.out, *group.into)) for group in self.groups]
        self.states = {i: State(*(part[i] for part in x)) for i, t in enumerate(first) if t < step}
        return step, dict(zip([t for t in wanted if t <= step], rows, strict=True))

    def ahead(self) -> set[tuple[int, int]]:
        """The occurrences that are moved to earlier steps, where it is not known yet what random draws made of them."""
        return {
            (step, i)
            for group in self.groups
            for t, those in group.into.items()
            for step, i in those
            if t < min(step, self.tape.length) and self.tape.awaits(step)
        }

    def check(self, t: int) -> None:
        """Before step t: the step that led here must be the one that was differentiated."""
        if self._last is not None and t not in self.tape.anchored:  # there the run's own state follows
            step, after, before = self._last
            check_taken(after, flat([p.detach() for p in self.tape.parameters]), before, step)

    def over(self, t: int) -> None:
        """Carry the tangents over step t, which the training is about to take."""
        begun = [i for i, group in enumerate(self.groups) if i in self.states or group.concerns(t)]
        if begun:
            with _same_statistics(self.tape.recipe.model):  # the step itself changes them once
                self._carry(t, begun)

    def _carry(self, t: int, begun: Sequence[int]) -> None:
        now = flat_state(update.slots(self.tape.optimizer))
        gradient = step_gradient(lambda: self.tape.losses(t), self.tape.weights(t), self.tape.parameters)
        by = spans_of(self._sizes, update.coefficients(self.tape.optimizer))
        step = take(now, flat(gradient.grads), by, self.tape.recipe.clip_norm)
        self._last = t, step.after.theta, now.theta
        for i in begun:
            before = self.states.get(i)
            change = self._left_out(gradient, t, self.groups[i])
            if before is not None:
                change = change + flat(gradient.pull(split(before.theta, self._shapes))[1])
            zeros = torch.zeros_like(now.theta)
            self.states[i] = push(step, before or State(zeros, zeros, zeros), change)
            if not bool(self.states[i].theta.isfinite().all()):
                raise NumericalError(f"the tangent of group {i} overflowed at step {t}. Compute it in float64.")

    def _left_out(self, gradient: StepGradient, t: int, group: Group) -> Tensor:
        """What the group takes from the step's gradient and adds to it, (n,)."""
        gone = group.out.get(t, [])
        change = flat([torch.zeros_like(p) for p in self.tape.parameters])
        if gone:
            change -= flat(gradient.grads if len(gone) == len(self.tape.ids[t]) else gradient.of(gone))
        for step, position in group.into.get(t, ()):
            change += self._moved(step, position)
        return change

    def _moved(self, step: int, position: int) -> Tensor:
        """The gradient of one occurrence of another step, at the present weights."""
        recipe = self.tape.recipe
        batch, w = self.moved.get((step, position)) or _occurrence(self.tape, step, position)
        with torch.enable_grad():
            (loss,) = recipe.loss(recipe.model, batch)
            weighted = loss * w.to(loss)
            grads = torch.autograd.grad(weighted, self.tape.parameters, allow_unused=True)
        return flat(or_zeros(grads, self.tape.parameters))
