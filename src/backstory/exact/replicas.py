r"""Many replays of one run at once: the parameters of R replicas stacked, the batches shared, the weights their own.

One forward pass under `torch.func.vmap`; the sum of all replicas' losses has the stacked gradients as its gradient, since
no replica depends on another. Random draws (dropout) are shared by the replicas, and are those of the run.
Shapes:  R replicas, B samples.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..replay import update
from ..replay.removal import Places
from ..replay.tape import Tape, seed
from ..replay.update import Slots

STACK_BYTES = 4 << 20  # parameters of a stack: about what a processor's cache holds, and measured best
SAVED_BYTES = 512 << 20  # what the backward pass of a stack may keep
MOST = 256
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}  # of the first steps' displacement
Cut = tuple[Places, float]  # where a removal bites, and its share


class Replicas:
    """R copies of the tape's model, at the state where the tape stands."""

    def __init__(self, tape: Tape, cuts: Sequence[Cut]) -> None:
        self.tape, self.cuts = tape, cuts
        self._loss = _Losses(tape)
        names = {id(p): name for name, p in self._loss.named_parameters()}
        self._names = [names[id(p)] for p in tape.parameters]
        now = update.slots(tape.optimizer)
        self.slots = Slots(*(tuple(x.expand(len(cuts), *x.shape).clone() for x in part) for part in now))

    def step(self, t: int) -> None:
        """Step t of all replicas."""
        tape = self.tape
        W = torch.stack([tape.without(t, gone, share) for gone, share in self.cuts])  # (R, B)
        theta = [x.detach().requires_grad_() for x in self.slots.theta]  # the same memory
        seed(tape.generators[t])
        batch = tape.recipe.batches[t][1]

        def losses(parameters: dict[str, Tensor]) -> Any:
            return functional_call(self._loss, parameters, (batch,))

        with sdpa_kernel(SDPBackend.MATH):  # the fused attentions cannot be stacked
            stacked = vmap(losses, randomness="same")(dict(zip(self._names, theta, strict=True)))  # (R, B)
            grads = torch.autograd.grad((stacked * W.to(stacked)).sum(), theta, allow_unused=True)
        with torch.no_grad():
            known = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, theta, strict=True)]
            update.advance_(self.slots, known, tape.coefficients[t], tape.recipe.clip_norm, lead=1)

    def theta(self, r: int) -> tuple[Tensor, ...]:
        """The parameters of replica r."""
        return tuple(x[r].detach() for x in self.slots.theta)


def at_once(tape: Tape) -> int:
    """How many replicas fit the bounds of memory; 1 means that stacking is not worth it."""
    size = sum(p.numel() * p.element_size() for p in tape.parameters)
    return max(1, min(MOST, STACK_BYTES // max(1, size), SAVED_BYTES // max(1, _saved_bytes(tape))))


def obstacle(tape: Tape, cut: Cut, first: int) -> str | None:
    """Why replays cannot be stacked, or None: tried on the first steps of one removal, beside the plain replay."""
    if tape.obstacle is not None:
        return tape.obstacle
    if len({id(p) for p in tape.parameters}) < sum(p.requires_grad for p in tape.recipe.model.parameters()):
        return "the optimizer does not hold all trainable parameters"
    end = min(first + 3, tape.length)
    plain = _displaced(tape, cut, first, end)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # torch would loop inside
            start = tape.rewind(first)
            stack = Replicas(tape, [({}, 1.0), cut])
            for t in range(start, end):
                stack.step(t)
    except Exception as error:  # whatever torch.func cannot do; the plain replay gives the same numbers
        return f"torch.func cannot stack this model ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
    wrong = max(_distance(stack.theta(r), plain[r]) for r in (0, 1))
    size = _distance(plain[0], tuple(tape.states[start]["m"][n] for n in _names(tape)))
    if wrong <= TOLERANCE.get(tape.parameters[0].dtype, 1e-1) * size:
        return None
    return f"stacked and plain replays differ by {wrong / max(size, 1e-300):.1e} of the first steps' displacement"


class _Losses(nn.Module):
    """The recipe's loss as a module, so that `functional_call` can replace the model's parameters."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.model, self._of = tape.recipe.model, tape.recipe.loss

    def forward(self, batch: Any) -> Tensor:
        """(B,)."""
        return self._of(self.model, batch)


def _displaced(tape: Tape, cut: Cut, first: int, end: int) -> list[tuple[Tensor, ...]]:
    """Parameters before step `end`, without and with the removal, by plain replays."""
    out = []
    for gone, share in (({}, 1.0), cut):
        for t in range(tape.rewind(first), end):
            tape.step(t, tape.without(t, gone, share))
        out.append(tuple(p.detach().clone() for p in tape.parameters))
    return out


def _names(tape: Tape) -> list[str]:
    names = {id(p): name for name, p in tape.recipe.model.named_parameters()}
    return [names[id(p)] for p in tape.parameters]


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)))


def _saved_bytes(tape: Tape) -> int:
    """What one replica's backward pass keeps of one step."""
    sizes: dict[int, int] = {}
    held = {p.untyped_storage().data_ptr() for p in tape.parameters}

    def note(x: Tensor) -> Tensor:
        where = x.untyped_storage().data_ptr()
        if where not in held:
            sizes[where] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        kept = tape.losses(0)  # held until the count is done, so that no address is used twice
    del kept
    return sum(sizes.values())
