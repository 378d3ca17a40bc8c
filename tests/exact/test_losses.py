"""Losses of queries, and derivatives of a step against autograd written out."""

from typing import Any

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor
from torch.func import functional_call, jacrev

from backstory.errors import UsageError
from backstory.exact import losses as module
from backstory.exact.losses import QuerySet, batched_grad, gradients, losses, step_gradient


@pytest.mark.parametrize("q", [1, 3])
def test_products_are_those_of_dense_derivatives(q: int) -> None:
    recipe = examples.make()
    model, batch = recipe.model, recipe.batches[0][1]
    names, parameters = zip(*model.named_parameters(), strict=True)
    sizes = [p.numel() for p in parameters]
    w = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)

    def losses(flat: Tensor) -> Tensor:
        shaped = {n: x.view_as(p) for n, p, x in zip(names, parameters, flat.split(sizes), strict=True)}
        return torch.nn.functional.cross_entropy(
            functional_call(model, shaped, (batch[0],)), batch[1], reduction="none"
        )

    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    J, H = jacrev(losses)(theta), jacrev(jacrev(lambda x: w @ losses(x)))(theta)
    s = torch.randn(q, len(theta), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = step_gradient(lambda: recipe.loss(model, batch), w, parameters)
    dots, turned = actual.pull([x.view(q, *p.shape) for x, p in zip(s.split(sizes, 1), parameters, strict=True)])
    torch.testing.assert_close(torch.cat([g.reshape(-1) for g in actual.grads]), w @ J)
    torch.testing.assert_close(dots, s @ J.T)
    torch.testing.assert_close(torch.cat([x.flatten(1) for x in turned], 1), s @ H)


def test_a_parameter_without_a_gradient_gets_zeros() -> None:
    used, idle = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    actual = step_gradient(lambda: 3 * used, torch.ones(2, dtype=torch.float64), [used, idle])
    dots, turned = actual.pull([torch.ones(1, 2, dtype=torch.float64)] * 2)
    assert actual.grads[1].tolist() == [0, 0]
    assert dots.tolist() == [[3, 3]]
    assert [x.tolist() for x in turned] == [[[0, 0]], [[0, 0]]]


class Unbatched(torch.autograd.Function):
    """A square whose derivative leaves torch, so that it cannot be batched."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return torch.tensor((2 * x * g).detach().tolist(), dtype=x.dtype)


def test_derivatives_that_cannot_be_batched_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = Unbatched.apply(x)  # type: ignore[no-untyped-call]
    calls = []
    original = module._one_by_one

    def counted(*args: Any) -> list[Tensor | None]:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(module, "_one_by_one", counted)
    (rows,) = batched_grad([y], [x], [torch.eye(3)])
    assert rows is not None
    assert torch.equal(rows, torch.diag(2 * x.detach()))
    assert calls


FORWARD = (3 + 1) + (5 + 1) + 2  # the sums behind one loss: two layers and the softmax


def test_names_sets_and_functions_ask_the_same() -> None:
    recipe = examples.make(dropout=0.5)
    by_name, mean = losses(recipe, "q"), losses(recipe, QuerySet("q", mean=True))
    assert_same(by_name, losses(recipe, lambda m: recipe.loss(m, recipe.queries["q"])), 2 * FORWARD)
    assert by_name.shape == (3,)
    torch.testing.assert_close(mean, by_name.mean()[None])


def test_eval_mode_without_drawing_and_every_flag_put_back() -> None:
    recipe = examples.make(dropout=0.5)
    recipe.model[0].eval()  # type: ignore[index]
    before = torch.get_rng_state()
    assert_same(losses(recipe, "q"), losses(recipe, "q"), 2 * FORWARD)  # a mask that is drawn would change them by half
    losses(recipe, lambda m: torch.rand(2))
    assert torch.equal(before, torch.get_rng_state())
    assert [m.training for m in recipe.model.children()] == [False, True, True, True]


def test_gradients_are_those_of_one_query_at_a_time() -> None:
    recipe = examples.make()
    parameters = list(recipe.model.parameters())
    rows = gradients(recipe, "q", parameters)
    for q in range(3):
        expected = torch.autograd.grad(recipe.loss(recipe.model, recipe.queries["q"])[q], parameters)
        for row, e in zip(rows, expected, strict=True):
            torch.testing.assert_close(row[q], e)


def test_what_is_not_there_or_not_a_loss_is_refused() -> None:
    recipe = examples.make()
    with pytest.raises(UsageError, match="It has: q"):
        losses(recipe, "other")
    with pytest.raises(UsageError, match="scalar"):
        losses(recipe, lambda m: torch.zeros(2, 2))


def test_a_query_that_is_a_view_of_a_weight_is_copied() -> None:
    recipe = examples.make()
    bias = list(recipe.model.parameters())[-1]
    actual = losses(recipe, lambda m: bias)
    with torch.no_grad():
        bias.add_(1)
    assert torch.equal(actual + 1, bias.detach())
