"""What the trained model is asked."""

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_same

from backstory.errors import UsageError
from backstory.exact.losses import QuerySet, gradients, losses

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
    with pytest.raises(UsageError, match="it has: q"):
        losses(recipe, "other")
    with pytest.raises(UsageError, match="scalar"):
        losses(recipe, lambda m: torch.zeros(2, 2))


def test_a_query_that_is_a_view_of_a_weight_is_copied() -> None:
    recipe = examples.make()
    bias = list(recipe.model.parameters())[-1]
    found = losses(recipe, lambda m: bias)
    with torch.no_grad():
        bias.add_(1)
    assert torch.equal(found + 1, bias.detach())
