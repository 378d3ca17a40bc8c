"""Gradient dot product and cosine, against explicit products."""

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import Batch, by_id, cross_entropy, data, queries, recipe, rows
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.similarity import gradient_cosine, gradient_dot


def test_dot_and_cosine_are_the_explicit_ones() -> None:
    made = recipe()
    G, V = rows(made.model, cross_entropy, data()), rows(made.model, cross_entropy, queries())
    assert_close(by_id(gradient_dot(made, queries())), V @ G.T, 1e-12)
    cosine = F.cosine_similarity(V[:, None], G[None], dim=2)
    assert_close(by_id(gradient_cosine(made, queries())), cosine, 1e-12)


def test_a_scalar_query_loss_is_one_query() -> None:
    def mean(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch).mean()

    each = gradient_dot(recipe(), queries()).scores.mean(0)
    assert_close(gradient_dot(recipe(), queries(), loss=mean).scores[0], each, 1e-12)


@pytest.mark.parametrize("method", [gradient_dot, gradient_cosine])
def test_batch_size_and_order_do_not_matter(method: object) -> None:
    assert callable(method)
    expected = by_id(method(recipe(), queries()))
    for size, seed in ((1, 0), (7, 3), (30, 1)):
        assert_close(by_id(method(recipe(size=size, seed=seed), queries())), expected, 1e-12)


def test_a_step_along_a_positive_sample_lowers_the_loss() -> None:
    made = recipe()
    answer = gradient_dot(made, queries(1))
    x, y = data()
    best = int(answer.top(1)[0].sample)
    before = float(cross_entropy(made.model, queries(1)).detach())
    cross_entropy(made.model, (x[[best]], y[[best]])).sum().backward()
    with torch.no_grad():
        for p in made.model.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=1e-3)
    assert float(cross_entropy(made.model, queries(1)).detach()) < before
    assert answer.top(1)[0].influence > 0


def test_a_sample_without_gradient_has_cosine_0() -> None:
    def masked(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch) * (batch[0][:, 0] > 0)

    answer = by_id(gradient_cosine(recipe(loss=masked), queries(), loss=cross_entropy))
    assert bool((answer[:, data()[0][:, 0] <= 0] == 0).all())
    assert bool(answer.isfinite().all())


def test_answers_say_what_they_are() -> None:
    answer = gradient_dot(recipe(names=lambda i: f"s{i}"), queries())
    text = repr(answer)
    assert answer.method == "gradient dot product"
    assert "rank only" in text
    assert "the sample helped" in answer.caveats[0]
    assert answer.at == 10
    assert isinstance(answer.top(1, query=0)[0].sample, str)
