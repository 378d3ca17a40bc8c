"""The bound's own retraining and unrolling against the truth's, and a bound that must hold."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experiments.data.images import setup_of
from experiments.fidelity.full import influences, replayed
from experiments.small.bound import Flat, flat, measured, removal, scheduled, study
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import reverse
from backstory.replay.tape import Removal

D = torch.float64


def made() -> Recipe:
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=D))
    batch = (torch.randn(4, 2, generator=g, dtype=D), torch.tensor([0, 1, 2, 1]))
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
        batches=[([0, 1, 2, 3], batch)],
        queries={"test": batch},
    )


def by_hand(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The same net written out; losses (B,)."""
    W1, b1, W2, b2 = theta[:4].reshape(2, 2), theta[4:6], theta[6:12].reshape(3, 2), theta[12:]
    return F.cross_entropy(torch.tanh(x @ W1.T + b1) @ W2.T + b2, y, reduction="none")


def third(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """All third derivatives of one sample's loss, (p, p, p): differences of its Hessian."""

    def curvature(w: Tensor) -> Tensor:
        actual = torch.autograd.functional.hessian(lambda v: by_hand(v, x, y)[0], w)
        assert isinstance(actual, Tensor)
        return actual

    h = 1e-4
    steps = h * torch.eye(len(theta), dtype=D)
    return torch.stack([(curvature(theta + e) - curvature(theta - e)) / (2 * h) for e in steps])


@pytest.fixture
def net() -> Flat:
    return flat(made())


def test_gradients_and_hessian(net: Flat) -> None:
    x, y = net.batches[0]
    g = net.gradients(net.start, 0)
    expected = torch.autograd.functional.jacobian(lambda w: by_hand(w, x, y), net.start)
    torch.testing.assert_close(g, expected)
    H, _, empirical = net.curvatures(net.start, 0)
    torch.testing.assert_close(H, torch.autograd.functional.hessian(lambda w: by_hand(w, x, y).mean(), net.start))
    torch.testing.assert_close(empirical, sum(torch.outer(row, row) for row in g) / 4)
    assert float(net.steepest(net.start[None])) == pytest.approx(float(expected.norm(dim=1).max()))


def test_the_gauss_newton_matrix_is_the_expected_fisher(net: Flat) -> None:
    """Σ_c p_c g_c g_cᵀ with the gradient g_c for label c, one label at a time."""
    x, _ = net.batches[0]
    total = torch.zeros(15, 15, dtype=D)
    for i in range(4):
        for c in range(3):
            label = torch.tensor([c])
            loss = by_hand(net.start, x[i : i + 1], label)
            (g,) = torch.autograd.functional.jacobian(lambda w, i=i, y=label: by_hand(w, x[i : i + 1], y), net.start)
            total += torch.exp(-loss) * torch.outer(g, g) / 4
    torch.testing.assert_close(net.curvatures(net.start, 0)[1], total)


def test_the_lipschitz_constant_is_the_largest_third_derivative(net: Flat) -> None:
    """Beside the whole third-derivative tensor of each sample, tried in many directions."""
    x, y = net.batches[0]
    g = torch.Generator().manual_seed(1)
    u = torch.randn(500, 15, generator=g, dtype=D)
    u = u / u.norm(dim=1, keepdim=True)
    best = 0.0
    for i in range(4):
        T = third(net.start, x[i : i + 1], y[i : i + 1])  # (p, p, p)
        tried = ((u @ T.reshape(15, -1)).reshape(-1, 15, 15) * u[:, :, None] * u[:, None]).sum((1, 2)).abs()
        v = u[int(tried.argmax())]
        for _ in range(60):
            v = torch.einsum("abc,b,c->a", T, v, v)
            v = v / v.norm()
        best = max(best, float(torch.einsum("abc,a,b,c->", T, v, v, v).abs()))
    actual = float(net.lipschitz(net.start, 0))
    assert actual == pytest.approx(best, rel=0.05), f"ratio {actual / best:.3f}: 4 would mean a sum over the batch"


def test_the_querys_curvature_is_looked_at_on_the_way(net: Flat) -> None:
    other = net.start * 0.5
    ends = [float(torch.linalg.matrix_norm(net.curvatures(w, 0)[0], 2)) for w in (net.start, other)]
    assert net.query_bend(net.start, other) >= max(ends) * (1 - 1e-12)
    assert net.query_bend(net.start, net.start) == pytest.approx(ends[0])
    torch.testing.assert_close(net.query_gradient(net.start), net.gradients(net.start, 0).mean(0))


TINY = replace(setup_of("tiny", "gelu", "sgd", 2, 32), hidden=2, queries=10)  # T = 4
QUERY = QuerySet("test", mean=True)


@pytest.fixture(scope="module")
def actual() -> dict[str, Any]:
    return study(TINY, 0, C=3.0, count=3)


def test_the_rates_are_the_theorems() -> None:
    plan = scheduled(TINY, 0, 3.0)
    seen = []
    for _ in range(3):
        seen.append(plan.optimizer.param_groups[0]["lr"])
        plan.optimizer.step()
        plan.schedule.step()
    assert seen == pytest.approx([3 / (4 * t) ** 0.5 for t in (1, 2, 3)])


def test_retraining_and_unrolling_agree_with_the_truth(actual: dict[str, Any]) -> None:
    def make() -> Any:
        return scheduled(TINY, 0, 3.0)

    gone = [Removal((r["sample"],), (r["step"],)) for r in actual["rows"]]
    truth = leave_out(make, gone, QUERY, dtype=torch.float64)[:, 0]
    answer = reverse(make, QUERY)
    for row, removed, expected in zip(actual["rows"], gone, truth, strict=True):
        assert row["truth"] == pytest.approx(float(expected), rel=1e-8)
        exact = float(answer.sum_over(removed.samples, steps=removed.steps)[0])
        assert row["hessian"]["influence"] == pytest.approx(exact, rel=1e-7)


def test_the_embeddings_agree_with_the_adjoint(actual: dict[str, Any]) -> None:
    replay = replayed(scheduled(TINY, 0, 3.0))
    at = {(t, i): k for k, (t, i) in enumerate((t, i) for t, (ids, _) in enumerate(replay.recipe.batches) for i in ids)}
    for name, curvature in (("ggn", "exact"), ("empirical", "empirical")):
        scores = influences(replay, curvature)
        for row in actual["rows"]:
            expected = float(scores[at[row["step"], row["sample"]]])
            assert row[name]["influence"] == pytest.approx(expected, rel=1e-7), name


def test_the_bounds_hold_and_the_theorem_is_what_it_says(actual: dict[str, Any]) -> None:
    k = actual["constants"]
    assert k["theorem"] == pytest.approx(
        32 / 3 * k["G"] ** 2 * k["C"] ** 3 * k["L"] * torch.tensor(k["C"] * k["Lambda"]).exp().item(), rel=1e-5
    )
    assert k["proof"] < k["theorem"]
    assert (k["T"], k["parameters"]) == (4, 64 * 2 + 2 + 2 * 10 + 10)
    for row in actual["rows"]:
        assert row["hessian"]["weights_error"] <= row["weights_bound"] <= k["theorem"]
        for name in ("hessian", "ggn", "empirical"):
            assert row[name]["error"] <= row[name]["bound"], name
    assert all(v["held"] for v in actual["verdict"].values())
    assert json.loads(json.dumps(actual)) == actual


def test_a_removal_at_the_last_step_is_exact() -> None:
    plan = scheduled(TINY, 0, 3.0)
    row, without = removal(measured(plan, 3.0), 3, 0)
    assert row["weights_bound"] == 0.0
    assert row["hessian"]["weights_error"] < 160 * 16 * 2**-53 < 1e-6 < row["distance"]  # 160 weights, batches of 16
    assert row["ggn"]["influence"] == pytest.approx(row["hessian"]["influence"], rel=1e-12)
    assert len(without) == 5


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="at most"):
        study(replace(TINY, hidden=64))
    with pytest.raises(UsageError, match="above 0"):
        study(TINY, C=0.0)
