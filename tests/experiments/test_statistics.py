"""Intervals in cases whose answer is known; all queries and both methods share their resamples."""

import numpy as np
import pytest
import torch
from experiments.statistics import Pair, agreement, difference, interval, order, weighted
from tests.exact.test_spearman import counted, draw
from torch import Tensor

from backstory.exact.check import spearman


def test_counts_give_what_the_drawn_values_give() -> None:
    x, y = draw(20, 0), draw(20, 1)
    picks = torch.randint(20, (20,), generator=torch.Generator().manual_seed(2))
    C = torch.bincount(picks, minlength=20).double()[None]
    actual = float(weighted(order(x), order(y), C)[0])
    assert actual == pytest.approx(counted(x[picks], y[picks]), abs=1e-12)


def pairs(good: float, bad: float) -> list[Pair]:
    out = []
    for seed in range(4):
        truth = draw(60, seed)
        out.append(Pair(truth, truth + good * draw(60, 100 + seed), truth + bad * draw(60, 200 + seed)))
    return out


def test_the_interval_of_a_clear_difference_excludes_0() -> None:
    mean, lower, upper = difference(pairs(0.1, 2.0))
    assert 0 < lower < mean < upper
    flipped = difference([Pair(p.truth, p.theirs, p.ours) for p in pairs(0.1, 2.0)])
    assert flipped[2] < 0


def test_the_interval_of_equally_good_predictors_includes_0() -> None:
    mean, lower, upper = difference(pairs(1.0, 1.0))
    assert lower < 0 < upper
    assert lower < mean < upper


def test_a_method_does_not_differ_from_itself() -> None:
    actual = difference([Pair(p.truth, p.ours, p.ours) for p in pairs(0.5, 0.5)])
    assert actual == (0.0, 0.0, 0.0), "sums of whole numbers are exact"


def test_seeds_that_disagree_widen_the_interval() -> None:
    """Removals alone would say that the mean difference is sure; other seeds would have given another one."""
    clear = pairs(0.1, 2.0)
    mixed = [*clear[:2], *(Pair(p.truth, p.theirs, p.ours) for p in clear[2:])]
    _, lower, upper = difference(mixed)
    assert lower < -0.2
    assert upper > 0.2


def test_intervals_are_the_same_twice() -> None:
    assert difference(pairs(0.5, 1.0)) == pytest.approx(difference(pairs(0.5, 1.0)), abs=1e-14)
    assert interval(scored(0.5)) == pytest.approx(interval(scored(0.5)), abs=1e-14)


def scored(noise: float, seeds: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(draw(60, s) + noise * draw(60, 100 + s), draw(60, s)) for s in range(seeds)]


def test_the_interval_of_a_mean_holds_the_mean_and_narrows_with_better_scores() -> None:
    actual = {}
    for noise in (0.1, 1.0):
        lower, upper = interval(scored(noise))
        assert lower < sum(spearman(*one) for one in scored(noise)) / 4 < upper
        actual[noise] = upper - lower
    assert actual[0.1] < actual[1.0] / 3


def test_the_interval_of_one_seed_is_that_of_its_removals_drawn_again() -> None:
    """With NumPy's generator and ranks counted one by one; quantiles of 1,000 draws differ by about 0.01."""
    ((score, truth),) = scored(1.0, seeds=1)
    picks = np.random.default_rng(0).integers(60, size=(1000, 60))
    drawn = [counted(score[pick], truth[pick]) for pick in torch.tensor(picks)]
    expected = np.quantile(drawn, [0.025, 0.975])
    assert interval([(score, truth)]) == pytest.approx(tuple(expected), abs=0.03)


def test_seeds_that_disagree_widen_the_interval_of_the_mean() -> None:
    good = scored(0.1)
    mixed = [*good[:2], *((-score, truth) for score, truth in good[2:])]
    lower, upper = interval(mixed)
    assert lower < -0.4
    assert upper > 0.4


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_agreement_is_the_mean_over_the_queries() -> None:
    scores, truth = noise(9, 4), noise(9, 4, seed=1)
    each = [counted(scores[:, d], truth[:, d]) for d in range(4)]
    assert agreement(scores, truth) == pytest.approx(sum(each) / 4)
    mixed = torch.cat([truth[:, :3], -truth[:, 3:]], 1)
    assert agreement(mixed, truth) == pytest.approx(0.5)
    assert agreement(scores[:, 0], truth[:, 0]) == pytest.approx(each[0])


def test_queries_share_their_resamples() -> None:
    """Four copies of one query are one query: their interval must not shrink as four independent ones would."""
    truth = noise(30, 1)
    scores = truth + noise(30, 1, seed=1)
    one, four = interval([(scores, truth)]), interval([(scores.expand(-1, 4), truth.expand(-1, 4))])
    assert four == pytest.approx(one)
    assert interval([(scores[:, 0], truth[:, 0])]) == pytest.approx(one)


def test_differences_over_several_queries_are_paired() -> None:
    truth = noise(30, 4)
    scores = truth + 2 * noise(30, 4, seed=1)
    assert difference([Pair(truth, scores, scores)]) == pytest.approx((0.0, 0.0, 0.0), abs=1e-14)
    mean, lower, upper = difference([Pair(truth, truth, scores), Pair(truth, truth, scores)])
    assert mean == pytest.approx(1 - agreement(scores, truth))
    assert 0 < lower < mean < upper
