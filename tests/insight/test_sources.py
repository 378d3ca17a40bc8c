"""Values of sources: sums by hand, intervals against what theory says, and reproducible draws."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.insight.runs import SOURCES, Small, loss
from tests.support.oracles import assert_same

from backstory.errors import UsageError
from backstory.insight.sources import bootstraps, sources

Floats = np.ndarray[Any, np.dtype[np.float64]]


def assert_sums(actual: Floats, expected: Floats, scores: Floats) -> None:
    """Sums of drawn scores, of which every one may be in a group, a few times: up to rounding."""
    size = float(np.abs(scores).mean(0).sum())
    assert_same(torch.from_numpy(actual), torch.from_numpy(expected), scores.size, size=size)


def test_values_are_sums_of_influence(plain: Small) -> None:
    x, y = plain.queries
    sets = {"a": (x[:3], y[:3]), "b": (x[3:], y[3:])}
    actual = sources(plain.run, plain.model, loss, sets, draws=50)
    assert sorted(actual.sources) == sorted(SOURCES)
    assert actual.domains == ("a", "b")
    answers = {d: plain.run.query(plain.model, loss, batch) for d, batch in sets.items()}
    for i, name in enumerate(actual.sources):
        ids = [k for k in range(9) if SOURCES[k % 3] == name]
        for j, domain in enumerate(actual.domains):
            cell = actual.cells[i][j]
            assert (
                actual.matrix[i, j]
                == cell.value
                == pytest.approx(float(answers[domain].sum_over(ids).mean()), rel=1e-9)
            )
            assert (cell.source, cell.domain, cell.samples, cell.queries) == (name, domain, 3, (3, 1)[j])
            assert cell.per_sample == cell.value / 3
            assert cell.low < cell.high
        assert actual.total[i].low < actual.total[i].high
        assert actual.total[i].value == pytest.approx(actual.matrix[i].mean())
    values = [v.value for v in actual.total]
    assert values == sorted(values, reverse=True)


def test_labels_may_take_the_place_of_sources(plain: Small) -> None:
    actual = sources(plain.run, plain.model, loss, {"all": plain.queries}, by="label", draws=50)
    assert sorted(actual.sources) == ["0", "1"]


def test_intervals_are_those_of_theory() -> None:
    """Sums of independent numbers: the spread of a sum over n samples is √n times that of one; of queries likewise."""
    g = np.random.default_rng(0)
    n, Q = 400, 300
    of_samples, of_queries = g.normal(1.0, 2.0, n), g.normal(0.0, 1.0, Q)
    group = np.array([0] * 100 + [1] * 300)
    alone = bootstraps([np.broadcast_to(of_samples, (Q, n))], group, 2000, seed=0)[0]
    for k in (0, 1):
        mine = of_samples[group == k]
        assert alone[:, k].mean() == pytest.approx(mine.sum(), rel=0.02)
        assert alone[:, k].std() == pytest.approx(mine.std() * len(mine) ** 0.5, rel=0.08)
    shared = bootstraps([np.broadcast_to(of_queries[:, None], (Q, n))], group, 2000, seed=0)[0]
    for k, size in ((0, 100), (1, 300)):
        assert shared[:, k].std() == pytest.approx(size * of_queries.std() / Q**0.5, rel=0.08)
    correlated = np.asarray(np.corrcoef(shared.T))
    assert correlated[0, 1] > 0.99, "all sources are asked the same queries"


def test_groups_in_any_order_and_pieces_of_any_size() -> None:
    g = np.random.default_rng(1)
    scores, group = g.normal(size=(1, 30)) + np.arange(30) % 3 * 100, np.arange(30) % 3
    whole = bootstraps([scores], group, 64, seed=3)[0]
    assert whole.shape == (64, 3)
    np.testing.assert_allclose(whole.mean(0), [scores[0, group == k].sum() for k in range(3)], rtol=0.02, atol=5)
    for at_once in (1, 30 * 7, 30 * 64):
        assert_sums(bootstraps([scores], group, 64, seed=3, at_once=at_once)[0], whole, scores)
    assert np.abs(bootstraps([scores], group, 64, seed=4)[0] - whole).max() > 1


def test_an_answer_in_plain_values(plain: Small) -> None:
    x, y = plain.queries
    actual = sources(plain.run, plain.model, loss, {"a": (x[:2], y[:2]), "b": (x[2:], y[2:])}, draws=50)
    told = actual.as_dict()
    assert told["total"][0]["low"] <= told["total"][0]["high"]
    assert told["interval"] == "95 %"
    assert np.array(told["matrix"]).shape == (3, 2)
    assert len(actual.to_pandas()) == 6
    assert list(actual.drawings()) == ["sources", "matrix"]
    one = sources(plain.run, plain.model, loss, {"a": plain.queries}, draws=50)
    assert list(one.drawings()) == ["sources"]
    again = sources(plain.run, plain.model, loss, {"a": plain.queries}, draws=50)
    assert again.sources == one.sources
    values, expected = (
        torch.tensor([[v.value, v.low, v.high] for v in x.total], dtype=torch.float64) for x in (again, one)
    )
    assert_same(
        values, expected, 4 * 36 + 12 * (26 + 3)
    )  # 4 queries and 36 uses; 12 steps of 26 coordinates and 3 rows


def test_wrong_arguments(plain: Small) -> None:
    with pytest.raises(UsageError, match="draws of at least 40"):
        sources(plain.run, plain.model, loss, {})
    with pytest.raises(UsageError, match="by must be 'source' or 'label'"):
        sources(plain.run, plain.model, loss, {"a": plain.queries}, by="colour")
    assert torch.is_grad_enabled()


def test_domains_share_the_samples_that_are_drawn() -> None:
    g = np.random.default_rng(1)
    group, scores = g.integers(0, 3, 40), [g.normal(size=(q, 40)) for q in (5, 2)]
    actual = bootstraps(scores, group, 64, seed=3, at_once=400)
    for one, x in zip(actual, scores, strict=True):
        assert_sums(one, bootstraps([x], group, 64, seed=3, at_once=400)[0], x)
    same = np.broadcast_to(g.normal(size=40), (4, 40))  # no query differs: what is left are the samples
    four, two = bootstraps([same, same[:2]], group, 64, seed=3)
    assert_sums(four, two, same)
