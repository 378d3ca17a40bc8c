"""The derivative of one update, against autograd through the update written as a function, and against torch.optim's own steps."""

from functools import partial

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.exact.derivative import State, Update, flat, pull, push, spans_of, take
from backstory.exact.states import flat_state
from backstory.replay import update
from backstory.replay.tape import Tape, own_randomness
from backstory.replay.update import Slots

D = torch.float64
CAUSES = "A ratio of c would mean that clipping is missing, 1/(1−β₁) the bias correction, −1 a wrong sign."


class Taken:
    """The fifth step of a small run: its update here, and as autograd differentiates it."""

    def __init__(self, kind: str, clip: float | None) -> None:
        with own_randomness():
            self.tape = Tape(partial(examples.make, kind, clip))
            self.tape.record([4])
            self.tape.rewind(4)
        self.shapes = [p.shape for p in self.tape.parameters]
        self.now = update.slots(self.tape.optimizer)
        losses = self.tape.losses(4) @ self.tape.weights(4)
        self.grads = torch.autograd.grad(losses, self.tape.parameters)
        by = spans_of([s.numel() for s in self.shapes], self.tape.coefficients[4])
        self.step: Update = take(flat_state(self.now), flat(self.grads), by, clip)
        self.clip = clip

    def by_autograd(self, x: Tensor) -> Tensor:
        """θ', m', v' side by side (3n,), from θ, m, v and g (4n,), by the update as a function."""
        parts = [p.split([s.numel() for s in self.shapes]) for p in x.chunk(4)]
        tensors = [tuple(v.view(s) for v, s in zip(part, self.shapes, strict=True)) for part in parts]
        slots = Slots(*(self.like(new, old) for new, old in zip(tensors[:3], self.now, strict=True)))
        after = update.update(slots, tensors[3], self.tape.coefficients[4], self.clip)
        return torch.cat([self.wide(part) for part in after])

    def like(self, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(a if a.shape == b.shape else b for a, b in zip(new, old, strict=True))

    def wide(self, part: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([x.expand(s).reshape(-1) for x, s in zip(part, self.shapes, strict=True)])

    @property
    def jacobian(self) -> Tensor:
        """(3n, 4n)."""
        x = torch.cat([*flat_state(self.now), flat(self.grads)])
        J: Tensor = torch.autograd.functional.jacobian(self.by_autograd, x)
        return J


@pytest.fixture(params=[(k, c) for k in examples.KINDS for c in (None, 0.15)], ids=str, scope="module")
def taken(request: pytest.FixtureRequest) -> Taken:
    return Taken(*request.param)


def test_the_update_is_the_one_that_torch_takes(taken: Taken) -> None:
    taken.tape.step(4)
    after = flat_state(update.slots(taken.tape.optimizer))
    for actual, expected in zip(taken.step.after, after, strict=True):
        assert_close(
            actual, expected, rtol=1e-11
        )  # torch keeps NAdam's μ product in float32, and in float64 once it is loaded


def test_pull_is_the_transposed_jacobian(taken: Taken) -> None:
    n, g = len(taken.step.g), torch.Generator().manual_seed(0)
    x = torch.randn(2, 3 * n, generator=g, dtype=D)
    state, r = pull(taken.step, State(*x.clone().chunk(3, 1)))
    kept = [1.0, float(any(t.dim() for t in taken.now.m)), float(any(t.dim() for t in taken.now.v)), 1.0]
    expected = (x @ taken.jacobian).chunk(4, 1)
    for actual, e, there in zip((*state, r), expected, kept, strict=True):
        if there:
            assert_close(actual, e, rtol=1e-12, causes=CAUSES)


def test_push_is_the_jacobian(taken: Taken) -> None:
    n, g = len(taken.step.g), torch.Generator().manual_seed(1)
    dot = torch.randn(2, 4 * n, generator=g, dtype=D)
    for k, part in enumerate((taken.now.m, taken.now.v), start=1):
        if not any(t.dim() for t in part):
            dot[:, k * n : (k + 1) * n] = 0
    parts = dot.chunk(4, 1)
    actual = push(taken.step, State(*parts[:3]), parts[3])
    expected = (dot @ taken.jacobian.T).chunk(3, 1)
    for after, wanted in zip(actual, expected, strict=True):
        assert_close(after, wanted, rtol=1e-12, causes=CAUSES)


def test_pull_and_push_are_each_others_transpose(taken: Taken) -> None:
    n, g = len(taken.step.g), torch.Generator().manual_seed(2)
    x, dot = torch.randn(3, n, generator=g, dtype=D), torch.randn(4, n, generator=g, dtype=D)
    state, r = pull(taken.step, State(*x.clone()))
    after = push(taken.step, State(*dot[:3]), dot[3])
    left = sum(a @ b for a, b in zip(x, after, strict=True))
    right = sum(a @ b for a, b in zip((*state, r), dot, strict=True))
    assert_close(left, right, rtol=1e-12)


def test_neighbours_with_the_same_coefficients_are_one_span() -> None:
    a, b = update.Coefficients(rate=0.1), update.Coefficients(rate=0.2)
    assert [(s.first, s.last, s.by) for s in spans_of([2, 3, 4], [a, a, b])] == [(0, 5, a), (5, 9, b)]
