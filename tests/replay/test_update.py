"""The update as a function, against torch.optim's own steps."""

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_same
from torch import nn

from backstory.replay import update
from backstory.replay.recipe import take_step
from backstory.replay.update import Slots

D = torch.float64


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", examples.KINDS)
def test_one_run_and_a_stack_take_the_optimizers_steps(kind: str, clip: float | None) -> None:
    recipe = examples.make(kind, clip, schedule=True)
    now = update.slots(recipe.optimizer)
    stack = Slots(*(tuple(x.expand(3, *x.shape).clone() for x in part) for part in now))
    for t in range(len(recipe.batches)):
        coefficients = update.coefficients(recipe.optimizer)
        recipe.model.zero_grad()
        recipe.loss(recipe.model, recipe.batches[t][1]).mean().backward()
        grads = [p.grad.clone() for p in update.trained_parameters(recipe.optimizer) if p.grad is not None]
        take_step(recipe, t)
        now = update.update(now, grads, coefficients, clip)
        scales = torch.tensor([0.5, 1.0, 2.0], dtype=D)
        three = [torch.einsum("r,...->r...", scales, g) for g in grads]
        stack = update.update(stack, three, coefficients, clip, lead=1)
        true = update.slots(recipe.optimizer)
        for actual in (now, Slots(*(tuple(x[1] for x in part) for part in stack))):
            for part, expected in zip(actual, true, strict=True):
                for x, y in zip(part, expected, strict=True):
                    assert_same(x, y, 8 * (27 + 10), size=1.0)  # 8 steps: a norm over 27 weights, 10 operations


def test_a_stack_is_clipped_replica_by_replica() -> None:
    grads = [torch.tensor([[3.0], [0.3]], dtype=D), torch.tensor([[4.0], [0.4]], dtype=D)]
    a, b = (g * c for g, c in zip(grads, update._clip_factors(grads, 1.0, lead=1), strict=True))
    torch.testing.assert_close(torch.cat([a, b], 1), torch.tensor([[0.6, 0.8], [0.3, 0.4]], dtype=D), rtol=1e-6, atol=0)


def test_a_parameter_that_never_moved_has_a_finite_derivative() -> None:
    """Adam at v = 0, for example the weights of a pixel that is always black."""
    zero = torch.zeros(1, dtype=D)
    optimizer = torch.optim.Adam([nn.Parameter(zero.clone())], lr=0.1)
    g = zero.clone().requires_grad_()
    after = update.update(update.slots(optimizer), [g], update.coefficients(optimizer), None)
    (actual,) = torch.autograd.grad(after.theta[0].sum(), g)
    assert actual.item() == pytest.approx(-0.1 / 1e-8)


def test_what_is_not_modelled_is_named() -> None:
    p = [nn.Parameter(torch.zeros(1))]
    for optimizer, word in (
        (torch.optim.Adam(p, amsgrad=True), "AMSGrad"),
        (torch.optim.RMSprop(p, centered=True), "centered"),
        (torch.optim.Adafactor(p), "Adafactor"),
    ):
        assert word in (update.obstacle(optimizer) or "")
    assert update.obstacle(torch.optim.AdamW(p)) is None
