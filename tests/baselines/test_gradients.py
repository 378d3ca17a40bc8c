"""The samples of a recipe, each once; gradient rows against one backward pass each, and in random coordinates."""

from typing import Any

import pytest
import torch
from tests.baselines.problems import Batch, cross_entropy, data, mlp, order, queries, recipe, rows
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory import Recipe
from backstory.baselines import gradients as module
from backstory.baselines.gradients import check_size, gradients, survey
from backstory.errors import NumericalError, UsageError


def test_every_sample_once_at_its_last_step() -> None:
    made = recipe(size=7, epochs=3)
    actual = survey(made)
    last = {str(i): t for t, ids in enumerate(order(30, 7, 3)) for i in ids}
    assert dict(zip(actual.samples, actual.steps, strict=True)) == last
    assert len(actual) == 30
    assert actual.steps == sorted(actual.steps)
    assert [s for s, keep in actual.visits for _ in keep] == actual.steps
    assert actual.kind == "int"


def test_ids_of_two_kinds_and_no_batches_are_refused() -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    mixed: list[Any] = [([0], (x[:1], y[:1])), (["a"], (x[1:2], y[1:2]))]
    for batches in (mixed[:0], mixed):
        with pytest.raises(UsageError, match="ids of one type"):
            survey(Recipe(model=model, optimizer=sgd, loss=lambda m, b: m(b), batches=batches))


def test_a_sample_twice_in_a_batch_counts_once() -> None:
    training = survey(recipe(names=lambda i: i % 3))
    assert sorted(training.samples) == ["0", "1", "2"]


def test_full_rows_are_the_gradients() -> None:
    made = recipe()
    actual = gradients(made)
    ids = [int(s) for s in actual.training.samples]
    assert_close(actual.stack(), rows(made.model, cross_entropy, data())[ids], 1e-12)
    assert_close(actual.of(queries()), rows(made.model, cross_entropy, queries()), 1e-12)
    assert actual.dims == [20, 5, 15, 3]


def test_random_rows_keep_inner_products_on_average() -> None:
    made = recipe()
    G = rows(made.model, cross_entropy, data())
    total = torch.zeros(5, 30, dtype=torch.float64)
    for seed in range(150):
        actual = gradients(made, rank=2, seed=seed)
        total += actual.of(queries()) @ actual.stack().T
    ids = [int(s) for s in actual.training.samples]
    exact = rows(made.model, cross_entropy, queries()) @ G[ids].T
    slope = float((total / 150 * exact).sum() / exact.square().sum())
    assert abs(slope - 1) < 0.1, f"projected products are {slope:.3f} × the true ones; 4 would mean a missing 1/r"
    assert "of 43 coordinates" in " ".join(actual.caveats)


def test_progress_is_told_and_the_model_is_left_alone() -> None:
    made = recipe()
    made.model.train()
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    seen: list[tuple[int, int]] = []
    gradients(made, progress=lambda a, b: seen.append((a, b))).stack()
    assert seen[-1] == (5, 5)
    assert made.model.training
    assert all(p.grad is None for p in made.model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())


def test_layers_left_out_are_named() -> None:
    actual = gradients(recipe(), layers=["!0.bias"])
    assert actual.width == 38
    assert "left out: 0.bias" in actual.caveats


def test_parameters_without_a_rule_are_covered_by_the_general_one() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = mlp(), nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * self.scale
            return out

    assert gradients(recipe(Scaled())).width == 46
    assert gradients(recipe(Scaled()), layers=["!scale"]).width == 43


def test_a_scalar_training_loss_is_refused() -> None:
    def mean(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch).mean()

    with pytest.raises(UsageError, match="one loss per sample"):
        gradients(recipe(loss=mean)).stack()


def test_a_nan_names_its_step() -> None:
    x, y = data()
    x[3, 0] = torch.nan
    with pytest.raises(NumericalError, match="training batch of step"):
        gradients(recipe(xy=(x, y))).stack()


def test_too_large_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 30)
    with pytest.raises(UsageError, match="rank="):
        check_size(10**6, 10**4, 8)
