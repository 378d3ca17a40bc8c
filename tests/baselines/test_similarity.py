"""Gradient dot product and cosine, against explicit products."""

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import Batch, D, by_id, cross_entropy, data, mlp, queries, recipe, rows
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.similarity import gradient_cosine, gradient_dot, representation_similarity
from backstory.errors import UsageError


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
    assert "the sample helped" in answer.sign
    assert "rank only" in answer.unit
    assert answer.at == 10
    assert isinstance(answer.top(1, query=0)[0].sample, str)


def features(x: Tensor) -> Tensor:
    w, b = mlp().state_dict()["0.weight"], mlp().state_dict()["0.bias"]
    return torch.tanh(x @ w.T + b)


def test_the_input_of_the_last_linear() -> None:
    a, b = features(queries()[0]), features(data()[0])
    actual = representation_similarity(recipe(), queries())
    assert_close(by_id(actual), F.cosine_similarity(a[:, None], b[None], dim=2), 1e-12)
    assert_close(by_id(representation_similarity(recipe(), queries(), metric="dot")), a @ b.T, 1e-12)
    assert "input of 2" in " ".join(actual.caveats)
    assert "rank only" in " ".join(actual.caveats)


def test_a_module_by_name_and_any_batch_size() -> None:
    expected = by_id(representation_similarity(recipe(), queries()))
    assert_close(by_id(representation_similarity(recipe(size=7, seed=2), queries(), module="1")), expected, 1e-12)


def test_a_sample_is_most_alike_itself() -> None:
    x, y = data()
    actual = representation_similarity(recipe(), (x[4:5], y[4:5]))
    assert actual.top(1)[0].sample == 4
    assert actual.top(1)[0].influence == pytest.approx(1.0)


def test_positions_are_averaged() -> None:
    model = nn.Linear(4, 3).double()

    def pooled(m: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(m(batch[0]).mean(1), batch[1], reduction="none")

    x = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    y = torch.arange(8) % 3
    made = recipe(model, loss=pooled, xy=(x, y), size=4)
    actual = by_id(representation_similarity(made, (x[:2], y[:2]), metric="dot"), 8)
    assert_close(actual, x[:2].mean(1) @ x.mean(1).T, 1e-12)


def test_the_model_is_left_as_it_was() -> None:
    made = recipe()
    made.model.train()
    representation_similarity(made, queries())
    assert made.model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.model.modules())


def test_wrong_names_are_refused() -> None:
    with pytest.raises(UsageError, match="It has 0, 1, 2"):
        representation_similarity(recipe(), queries(), module="head")
    with pytest.raises(UsageError, match="cosine"):
        representation_similarity(recipe(), queries(), metric="euclid")
    bare = nn.Sequential(nn.Conv1d(4, 3, 1), nn.Flatten()).double()

    def conv(m: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(m(batch[0][:, :, None]), batch[1], reduction="none")

    with pytest.raises(UsageError, match="never called"):
        representation_similarity(recipe(bare, loss=conv), queries())
