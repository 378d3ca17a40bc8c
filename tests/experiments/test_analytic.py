"""Measured curves against explicit products of dense matrices; simplified ones where their assumption is true."""

from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.analytic import analytic
from tests.insight.runs import STEPS, Small, small
from tests.support.oracles import assert_same
from torch import nn

import backstory
from backstory.errors import UsageError


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return small("sgd", tmp_path_factory.mktemp("runs") / "plain")


def test_exact_curves_are_those_of_the_product(plain: Small) -> None:
    store = plain.run._store
    rows = store.read(0, store.n_rows(), dtype=torch.float64).rows
    assert rows is not None
    p, rates = rows.shape[1], store.steps().groups["rate"][:, 0]
    actual = analytic(plain.run, probes=None, contraction="never")
    K = torch.eye(p, dtype=torch.float64)
    for t in reversed(range(STEPS)):
        G = rows[3 * t : 3 * t + 3]
        assert actual.gradient_norm[t] == pytest.approx(float(G.norm(dim=1).mean()), rel=1e-4)
        assert actual.trace[t] == pytest.approx(float(K.trace()) / p, rel=1e-4)
        squares = (G @ K.T / 3).square().sum(1)
        assert actual.embedding_norm[t] == pytest.approx(float(squares.mean().sqrt()), rel=1e-4)
        K = K @ (torch.eye(p, dtype=torch.float64) - rates[t] / 3 * G.T @ G)


def test_probes_estimate_the_exact_curves(plain: Small) -> None:
    exact, drawn = analytic(plain.run, probes=None), analytic(plain.run, probes=2000)
    np.testing.assert_allclose(drawn.trace, exact.trace, rtol=0.05)
    np.testing.assert_allclose(drawn.embedding_norm, exact.embedding_norm, rtol=0.08)
    few = analytic(plain.run, probes=4, seed=1)
    same, other = (analytic(plain.run, probes=4, seed=s).trace for s in (1, 2))
    terms = STEPS * (2 * 3 + 4 * plain.run.width)  # 3 rows a step, there and back; 4 probes of the run's width
    assert_same(torch.from_numpy(same), torch.from_numpy(few.trace), terms, dtype=torch.float32)
    assert np.abs(other - few.trace).max() > 1e-2


def test_with_orthogonal_gradients_the_simplified_trace_is_the_trace(tmp_path: Path) -> None:
    """Each step sees another coordinate of a linear model."""
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.eye(6, dtype=torch.float64)
    with backstory.record(
        model, optimizer, tmp_path / "run", loss_reduction="mean", projection="full", encoding="float64"
    ) as rec:
        for t in range(5):
            optimizer.zero_grad()
            with rec.step([t]):
                model(x[t : t + 1]).square().sum().backward()
                optimizer.step()
    actual = analytic(backstory.open(tmp_path / "run"), probes=None, contraction="never")
    np.testing.assert_allclose(actual.trace_simple, actual.trace, rtol=1e-6)
    np.testing.assert_allclose(actual.trace_simple, [1 - 0.4 * (4 - t) / 6 for t in range(5)], rtol=1e-6)
    left = [(1 - 0.4) ** 2 * (4 - t) + 6 - (4 - t) for t in range(5)]
    np.testing.assert_allclose(actual.embedding_norm_simple, [2 * (f / 6) ** 0.5 for f in left], rtol=1e-6)
    np.testing.assert_allclose(actual.gradient_norm, 2.0, rtol=1e-6)


def test_momentum_counts_with_all_that_it_pays_out(tmp_path: Path) -> None:
    """Nesterov with μ = 0.9 moves by 10 η g in all; the simplified norm by hand, from the rows."""
    made = small("nesterov", tmp_path / "run")
    actual = analytic(made.run, probes=None)
    store = made.run._store
    rows, rates = store.read(0, store.n_rows(), dtype=torch.float64).rows, store.steps().groups["rate"][:, 0]
    assert rows is not None
    p = rows.shape[1]
    sigma = 10 * torch.from_numpy(rates).repeat_interleave(3) * rows.square().sum(1) / 3
    left = p - 2 * sigma[3:].sum() + sigma[3:].square().sum()
    expected = 10 * (rows[:3] / 3).square().sum(1).mean().sqrt() * (left.clamp_min(0) / p).sqrt()
    assert actual.embedding_norm_simple[0] == pytest.approx(float(expected), rel=1e-4)
    assert actual.trace_simple[0] == pytest.approx(1 - float(sigma[3:].sum()) / p, rel=1e-4)
    last = 10 * (rows[-3:] / 3).square().sum(1).mean().sqrt()
    assert actual.embedding_norm_simple[-1] == pytest.approx(float(last), rel=1e-4)


def test_an_answer_in_plain_values(plain: Small) -> None:
    actual = analytic(plain.run)
    assert len(actual.as_dict()["trace"]) == STEPS
    assert len(actual.to_pandas()) == STEPS
    assert [len(x["data"]) for x in actual.drawings().values()] == [1, 2, 2]
    with pytest.raises(UsageError, match="at least 1"):
        analytic(plain.run, probes=0)
