"""Losses of queries, and derivatives of a step against autograd written out."""

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor
from torch.func import functional_call, jacrev

from backstory.errors import UsageError
from backstory.exact.losses import QuerySet, gradients, losses, step_gradient


def test_products_are_those_of_dense_derivatives() -> None:
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
    s = torch.randn(len(theta), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = step_gradient(lambda: recipe.loss(model, batch), w, parameters)
    dots, turned = actual.pull([x.view(p.shape) for x, p in zip(s.split(sizes), parameters, strict=True)])
    torch.testing.assert_close(torch.cat([g.reshape(-1) for g in actual.grads]), w @ J)
    torch.testing.assert_close(dots, J @ s)
    along = actual.along([x.view(p.shape) for x, p in zip(s.split(sizes), parameters, strict=True)])
    torch.testing.assert_close(along, J @ s)
    torch.testing.assert_close(torch.cat([x.reshape(-1) for x in turned]), H @ s)
    part = torch.cat([g.reshape(-1) for g in actual.of([1, 3])])
    torch.testing.assert_close(part, w[[1, 3]] @ J[[1, 3]])


def test_a_parameter_without_a_gradient_gets_zeros() -> None:
    used, idle = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    actual = step_gradient(lambda: 3 * used, torch.ones(2, dtype=torch.float64), [used, idle])
    dots, turned = actual.pull([torch.ones(2, dtype=torch.float64)] * 2)
    assert actual.grads[1].tolist() == [0, 0]
    assert dots.tolist() == [3, 3]
    assert [x.tolist() for x in turned] == [[0, 0], [0, 0]]


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
        for row, e in zip(rows[q], expected, strict=True):
            torch.testing.assert_close(row, e)


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
