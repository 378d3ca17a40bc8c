"""Closest curves against scikit-learn's isotonic regression and against all places of the turn, with weights and without."""

import numpy as np
import pytest
from backstory.insight.shapes import Curve, corners, errors, falling, hill, prefix_errors, rising, valley
from sklearn.isotonic import IsotonicRegression


def noisy(n: int, seed: int) -> Curve:
    g = np.random.default_rng(seed)
    return np.asarray(g.standard_normal(n) + g.uniform(-3, 3) * np.linspace(0, 1, n))


def weights(n: int, seed: int) -> Curve:
    return np.asarray(np.random.default_rng(seed + 100).uniform(0.1, 5, n))


def isotonic(y: Curve, w: Curve, increasing: bool) -> Curve:
    if len(y) == 0:
        return y
    fit = IsotonicRegression(increasing=increasing).fit_transform(np.arange(len(y)), y, sample_weight=w)
    return np.asarray(fit)


def distance(y: Curve, w: Curve, increasing: bool) -> float:
    return float((w * (y - isotonic(y, w, increasing)) ** 2).sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_closest_curves_are_isotonic_regression(n: int, seed: int) -> None:
    y, w = noisy(n, seed), weights(n, seed)
    np.testing.assert_allclose(rising(y), isotonic(y, np.ones(n), True), atol=1e-12)
    np.testing.assert_allclose(rising(y, w), isotonic(y, w, True), atol=1e-12)
    np.testing.assert_allclose(falling(y, w), isotonic(y, w, False), atol=1e-12)
    prefixes = [distance(y[:k], w[:k], True) for k in range(n + 1)]
    np.testing.assert_allclose(prefix_errors(y.tolist(), w.tolist()), prefixes, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_closest_valley_and_hill_are_the_best_of_all_turns(seed: int) -> None:
    y, w = noisy(20, seed), weights(20, seed)
    found = errors(y, w)
    for turned, error, fit in ((False, found.valley, valley(y, w)), (True, found.hill, hill(y, w))):
        every = [distance(y[:c], w[:c], turned) + distance(y[c:], w[c:], not turned) for c in range(len(y) + 1)]
        assert error == pytest.approx(min(every), abs=1e-12)
        assert float((w * (y - fit) ** 2).sum()) == pytest.approx(error, abs=1e-12)
    assert found.rising == pytest.approx(distance(y, w, True), abs=1e-12)
    assert found.falling == pytest.approx(distance(y, w, False), abs=1e-12)
    assert errors(y) == errors(y, np.ones(20))


def test_the_corners_of_a_curve_that_has_them_are_found() -> None:
    x = np.arange(40.0)
    y = 2 + 3 * np.maximum(0, 1 - x / 8) + 1.5 * np.maximum(0, (x - 25) / 14)
    assert corners(y) == (8, 26), "the first that is above the level"


def test_what_weighs_nothing_moves_no_corner() -> None:
    x = np.arange(40.0)
    y, w = 2 + 3 * np.maximum(0, 1 - x / 8) + 1.5 * np.maximum(0, (x - 25) / 14), np.ones(40)
    y[[3, 15, 30]], w[[3, 15, 30]] = 50.0, 1e-12
    assert corners(y, w) == (8, 26)


def test_a_hill_has_no_such_corners() -> None:
    assert corners(-np.abs(np.linspace(-1, 1, 30))) == (0, 30)
