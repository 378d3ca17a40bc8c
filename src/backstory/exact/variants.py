r"""Variants of a run: trained again without some occurrences, or from weights one rounding unit away, all else equal.

The weights of the other samples stay what they were (`others="keep"`), or are scaled so that each step's add up to what they did
("renormalise": what training on the other samples with a mean loss would have done). A step that loses all its samples still takes an
optimizer step with gradient 0, on which momentum and weight decay act (`empty="coast"`, the limit of leaving out one sample after the
other, and what tangents are the derivative of), or is left out itself ("skip"). Order, schedule and random draws are the run's.

Many variants run stacked where the model allows (`Replicas`): the parameters of R replicas stacked, the batches shared, the weights their
own. One forward pass under `torch.func.vmap`; the sum of all replicas' losses has the stacked gradients as its gradient, since
no replica depends on another. Random draws (dropout) are those of the run. The numbers are those of the plain loop, up to rounding.

Shapes:  R replicas, B samples.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UnsupportedError, UsageError, check_one_of
from ..replay import update
from ..replay.recipe import Recipe
from ..replay.reproduction import shift
from ..replay.tape import Places, Progress, Tape, seed, tell
from ..replay.update import Slots, distance

OTHERS, EMPTY = ("keep", "renormalise"), ("coast", "skip")
WORTH_STACKING = 4  # replicas
STACK_BYTES = 4 << 20  # parameters of a stack: about what a processor's cache holds, and measured best
SAVED_BYTES = 512 << 20  # what the backward pass of a stack may keep
WORTH_BYTES = (
    2 << 20
)  # the same of one replica, above which a step is mostly arithmetic: a stack took a sixth longer (5 MB), a tenth less (1 MB)
MOST = 256
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}  # of the first steps' displacement
Theta = tuple[Tensor, ...]


@dataclass(frozen=True)
class Variant:
    """A training that differs from the run by what it leaves out, or by where it starts."""

    out: Places = field(default_factory=dict)
    share: float = 1.0  # of the weights of what is left out
    others: str = "keep"
    empty: str = "coast"
    twin: int | None = None  # starts one rounding unit away in every weight; the seed of that

    @property
    def first(self) -> int:
        """The first step that differs."""
        return 0 if self.twin is not None else min(self.out, default=0)

    def weights(self, tape: Tape, t: int) -> Tensor:
        """w_z of step t, (B,) float64."""
        w, gone = tape.weights(t), self.out.get(t)
        if not gone:
            return w
        left = w.clone()
        left[gone] *= 1 - self.share
        if self.others == "renormalise" and (rest := float(left @ (size := _sizes(tape.recipe, t)))):
            left *= float(w @ size) / rest
        return left

    def skips(self, tape: Tape, t: int) -> bool:
        """Whether it takes no step at t."""
        return self.empty == "skip" and self.share == 1 and len(self.out.get(t, ())) == len(tape.ids[t])

    def skips_any(self, tape: Tape) -> bool:
        """Whether it has fewer steps than the run."""
        return any(self.skips(tape, t) for t in self.out)


def _sizes(recipe: Recipe, t: int) -> Tensor:
    """What each sample of step t counts for in the loss's mean, (B,): 1, or its tokens."""
    ids, batch = recipe.batches[t]
    if recipe.loss_reduction == "token-mean" and recipe.tokens is not None:
        return recipe.tokens(batch).double()
    return torch.ones(len(ids), dtype=torch.float64)


def check_choices(others: str, empty: str, reduction: str) -> None:
    """Refuse what is no choice, or none for this reduction of the loss."""
    check_one_of("others", others, OTHERS)
    check_one_of("empty", empty, EMPTY)
    if others == "renormalise" and reduction == "weights":
        raise UsageError(
            "others='renormalise' needs to know what the loss is a mean over, but the recipe gives each sample's weight "
            "(loss_reduction='weights', as trainers' callbacks write it). Leave it at 'keep'."
        )
    if others == "renormalise" and reduction == "sum":
        raise UsageError(
            "others='renormalise' is for mean losses, but the recipe sums its losses: leaving samples out does not "
            "change the weights of the others. Leave it at 'keep'."
        )


def train_variants(
    tape: Tape,
    variants: Sequence[Variant],
    steps: Collection[int],
    visit: Callable[[int, int], None],
    progress: Progress | None = None,
) -> None:
    """Train one variant, or several stacked; `visit(i, t)` sees the tape's model with the weights of variant i before step t of `steps`."""
    start = tape.rewind(min(v.first for v in variants))
    trained: Replicas | Alone = Alone(tape, variants[0]) if len(variants) == 1 else Replicas(tape, variants)
    for t in range(start, tape.length + 1):
        if t in steps:
            for r in range(len(variants)):
                trained.show(r)
                visit(r, t)
        if t < tape.length:
            trained.step(t)
        tell(progress, t, tape.length)


class Alone:
    """The tape's own model as one variant, from the state where the tape stands."""

    def __init__(self, tape: Tape, variant: Variant) -> None:
        self.tape, self.variant = tape, variant
        self._aside = variant.twin is None or shift(tape.parameters, variant.twin)

    def step(self, t: int) -> None:
        """Step t, or none."""
        if self.variant.skips(self.tape, t):
            self.tape.skip()
        else:
            self.tape.step(t, self.variant.weights(self.tape, t))
        self._aside = self._aside or shift(self.tape.parameters, self.variant.twin or 0)

    def show(self, r: int) -> None:
        """The tape's model has its weights."""


def stacks(tape: Tape, variants: Sequence[Variant], vectorised: bool | None = None) -> Iterator[list[int]]:
    """Which variants to train together, by their numbers, in the order of their first steps; those that skip steps go alone.

    `vectorised=None` stacks where that works and pays, True requires it.
    """
    order = sorted(range(len(variants)), key=lambda i: variants[i].first)
    alone = {i for i in order if variants[i].skips_any(tape)}
    together = [i for i in order if i not in alone]
    size = _stack_size(tape, [variants[i] for i in together], vectorised)
    yield from (together[k : k + size] for k in range(0, len(together), size))
    yield from ([i] for i in order if i in alone)


def _stack_size(tape: Tape, variants: Sequence[Variant], vectorised: bool | None) -> int:
    """How many replays to stack; 1 for the plain loop."""
    if vectorised is False or not variants or (vectorised is None and len(variants) < WORTH_STACKING):
        return 1
    tape.rewind(0 if 0 in tape.states else min(tape.states))
    size = min(at_once(tape), len(variants))
    if vectorised is None and (size < WORTH_STACKING or _saved_bytes(tape) > WORTH_BYTES):
        return 1
    reason = obstacle(tape, variants[0], variants[0].first)
    if vectorised and reason is not None:
        raise UnsupportedError(f"the replays cannot be vectorised: {reason}. Pass vectorised=False, or workers=.")
    return max(size, 2) if reason is None else 1


class Replicas:
    """R copies of the tape's model, at the state where the tape stands."""

    def __init__(self, tape: Tape, variants: Sequence[Variant]) -> None:
        self.tape, self.variants = tape, variants
        self._loss = _Losses(tape)
        names = {id(p): name for name, p in self._loss.named_parameters()}
        self._names = [names[id(p)] for p in tape.parameters]
        now = update.slots(tape.optimizer)
        self.slots = Slots(*(tuple(x.expand(len(variants), *x.shape).clone() for x in part) for part in now))
        self._still = {r: v.twin for r, v in enumerate(variants) if v.twin is not None}
        self._step_aside()

    def _step_aside(self) -> None:
        """Twins leave the run as soon as there is a weight that is not 0."""
        for r, twin in [*self._still.items()]:
            if shift([x[r] for x in self.slots.theta], twin):
                del self._still[r]

    def step(self, t: int) -> None:
        """Step t of all replicas."""
        tape = self.tape
        W = torch.stack([variant.weights(tape, t) for variant in self.variants])  # (R, B)
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
            moved = update.update(self.slots, known, tape.coefficients[t], tape.recipe.clip_norm, lead=1)
        self.slots = Slots(*(_with_gradient(grads, *parts) for parts in zip(self.slots, moved, strict=True)))
        self._step_aside()

    def show(self, r: int) -> None:
        """Put the weights of replica r into the tape's model."""
        self.tape.load(self.theta(r))

    def theta(self, r: int) -> Theta:
        """The parameters of replica r."""
        return tuple(x[r].detach() for x in self.slots.theta)


def _with_gradient(grads: Sequence[Tensor | None], before: Theta, after: Theta) -> Theta:
    """`after`; what gets no gradient stays as it was, as torch's optimizers leave it."""
    return tuple(old if g is None else new for g, old, new in zip(grads, before, after, strict=True))


def at_once(tape: Tape) -> int:
    """How many replicas fit the bounds of memory; 1 means that stacking is not worth it."""
    fitting = STACK_BYTES // max(1, sum(p.numel() * p.element_size() for p in tape.parameters))
    return 1 if fitting < 2 else max(1, min(MOST, fitting, SAVED_BYTES // max(1, _saved_bytes(tape))))


def obstacle(tape: Tape, variant: Variant, first: int) -> str | None:
    """Why replays cannot be stacked, or None: tried on the first steps of one removal, beside the plain replay."""
    if tape.obstacle is not None:
        return tape.obstacle
    if len({id(p) for p in tape.parameters}) < sum(p.requires_grad for p in tape.recipe.model.parameters()):
        return "some trainable parameters are not in the optimizer"
    end = min(first + 3, tape.length)
    before, plain = _displaced(tape, variant, first, end)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # torch would loop inside
            start = tape.rewind(first)
            stack = Replicas(tape, [Variant(), variant])
            for t in range(start, end):
                stack.step(t)
    except Exception as error:  # whatever torch.func cannot do; the plain replay gives the same numbers
        return (
            f"torch.func cannot vectorise this model ({type(error).__name__}: {str(error).partition(chr(10))[0][:120]})"
        )
    wrong = max(distance(stack.theta(r), plain[r]) for r in (0, 1))
    size = distance(plain[0], before)
    if wrong <= TOLERANCE.get(tape.parameters[0].dtype, 1e-1) * size:
        return None
    return f"vectorised and plain replays differ by {wrong / max(size, 1e-300):.1e} of the weight change over the first steps"


class _Losses(nn.Module):
    """The recipe's loss as a module, so that `functional_call` can replace the model's parameters."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.model, self._of = tape.recipe.model, tape.recipe.loss

    def forward(self, batch: Any) -> Tensor:
        """(B,)."""
        return self._of(self.model, batch)


def _displaced(tape: Tape, variant: Variant, first: int, end: int) -> tuple[Theta, list[Theta]]:
    """Parameters at the state that replays start from, and before step `end`, without and with the removal, by plain replays."""
    out = []
    for one in (Variant(), variant):
        start = tape.rewind(first)
        before = update.slots(tape.optimizer).theta
        if one.twin is not None:
            shift(tape.parameters, one.twin)
        for t in range(start, end):
            tape.step(t, one.weights(tape, t))
        out.append(update.slots(tape.optimizer).theta)
    return before, out


def _saved_bytes(tape: Tape) -> int:
    """What one replica's backward pass keeps of one step."""
    sizes: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in tape.parameters}

    def note(x: Tensor) -> Tensor:
        where = x.untyped_storage().data_ptr()
        if where not in parameters:
            sizes[where] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        losses = tape.losses(0)  # alive until the count is done, so that no address is used twice
    del losses
    return sum(sizes.values())
