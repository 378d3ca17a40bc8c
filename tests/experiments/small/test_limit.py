"""The curve of the theorem, as plain values."""

import json

import pytest
import torch
import torch.nn.functional as F
from experiments.small.limit import influence_function, large_t_limit, problem, study, tsloo_of_all
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal

D = torch.float64


@pytest.mark.parametrize("model", ["linear", pytest.param("logistic", marks=pytest.mark.slow)])
def test_the_ratio_goes_to_one(model: str) -> None:
    curve = large_t_limit(model, steps=(10, 100, 1000), rate=0.05, batch=32)
    assert abs(curve.ratios[-1] - 1) < 0.03, f"ratios {curve.ratios}: B would mean a missing weight, −1 a wrong sign"
    assert abs(curve.ratios[0] - 1) > 0.15
    assert curve.as_dict()["steps"] == (10, 100, 1000)


@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_its_retraining_is_tsloo(model: str) -> None:
    p, steps, batch, rate = problem(model, 12, 3, 0.1, 0), 7, 4, 0.3
    actual = tsloo_of_all(p, steps, batch, rate, seed=5)

    def loss(m: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        output = m(rows[0]).squeeze(1)
        return 0.5 * (output - rows[1]) ** 2 if model == "linear" else F.softplus(-rows[1] * output)

    def at(t_s: int) -> Recipe:
        g = torch.Generator().manual_seed(5)
        net = nn.Linear(3, 1, bias=False, dtype=D)
        with torch.no_grad():
            net.weight.copy_(torch.randn(1, 3, generator=g, dtype=D))
        order = [b for _ in range(3) for b in torch.randperm(12, generator=g).split(batch)][:steps]
        batches = []
        for t, b in enumerate(order):
            xs, ys, ids = p.x[b], p.y[b], b.tolist()
            if t == t_s:
                xs, ys = torch.cat([xs, p.sample[0][None]]), torch.cat([ys, p.sample[1][None]])
                ids = [*ids, -1]
            batches.append((ids, (xs, ys)))
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, weight_decay=p.l2)
        return Recipe(
            model=net, optimizer=optimizer, loss=lambda m, b: loss(m, b) / batch, batches=batches, loss_reduction="sum"
        )

    query = (p.query[0][None], p.query[1][None])
    for t_s in range(steps):
        expected = leave_out(lambda t=t_s: at(t), [Removal((-1,))], lambda m: loss(m, query))  # type: ignore[misc]
        torch.testing.assert_close(actual[t_s], expected[0, 0], rtol=1e-9, atol=1e-13)


def test_the_influence_function_is_the_change_of_the_optimum() -> None:
    """A little of z* added to the objective moves the optimum; differences of Newton's solutions agree."""
    p, h = problem("logistic", 20, 3, 0.2, 1), 1e-4

    def query_loss(weight: float) -> Tensor:
        theta = torch.zeros(3, dtype=D, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe")  # fmt: skip

        def closure() -> float:
            optimizer.zero_grad()
            objective = F.softplus(-p.y * (p.x @ theta)).mean() + 0.1 * theta @ theta
            objective = objective + weight * F.softplus(-p.sample[1] * (p.sample[0] @ theta))
            objective.backward()
            return objective.item()

        optimizer.step(closure)
        return F.softplus(-p.query[1] * (p.query[0] @ theta.detach()))

    slope = (query_loss(-h) - query_loss(h)) / (2 * h)
    assert influence_function(p) == pytest.approx(slope.item(), rel=1e-4)


def test_what_makes_no_curve_is_refused() -> None:
    with pytest.raises(UsageError, match="linear, logistic"):
        large_t_limit("forest")
    with pytest.raises(UsageError, match="seeds"):
        large_t_limit(seeds=(0,))


def test_the_curves_are_those_of_the_truth_and_go_to_1() -> None:
    said: list[tuple[str, int, int]] = []
    actual = study(["logistic"], [300, 20], range(4), rate=0.1, batch=32, say=lambda *x: said.append(x))
    (curve,) = actual["curves"]
    expected = large_t_limit("logistic", steps=(20, 300), seeds=range(4), rate=0.1, batch=32)
    assert [p["steps"] for p in curve["points"]] == [20, 300]
    assert [p["ratio"] for p in curve["points"]] == pytest.approx(list(expected.ratios))
    assert [p["error"] for p in curve["points"]] == pytest.approx(list(expected.errors))
    assert abs(curve["points"][1]["ratio"] - 1) < 0.1 < abs(curve["points"][0]["ratio"] - 1)
    assert said == [("logistic: retrain", 1, 2), ("logistic: retrain", 2, 2)]
    assert json.loads(json.dumps(actual)) == actual


def test_steps_and_rate_must_be_positive() -> None:
    with pytest.raises(UsageError, match="above 0"):
        study(steps=[0])
    with pytest.raises(UsageError, match="above 0"):
        study(rate=0.0)
