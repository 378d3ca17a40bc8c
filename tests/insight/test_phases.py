"""Planted falls, rises, valleys and hills at the noise of the demo, and noise alone; and what must not change the finding."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from backstory.errors import UsageError
from backstory.insight.phases import (
    Curve,
    Phases,
    corners,
    errors,
    falling,
    hill,
    phases,
    prefix_errors,
    rising,
    valley,
)

STEPS, NOISE = (
    320,
    0.26,
)  # of the demo: its timeline's sizes lie around a smooth curve by this standard deviation of their logarithms
SHAPES = {
    "sudden": "three phases",
    "gentle": "three phases",
    "mild": "three phases",
    "brief": "three phases",
    "decay": "falls",
    "decay, then flat": "falls",
    "slow decay": "falls",
    "halves": "falls",
    "growth": "rises",
    "late growth": "rises",
    "doubles": "rises",
    "hill": "rises, then falls",
    "flat": "no clear pattern",
}


def curve(kind: str, n: int = STEPS) -> Curve:
    t = np.arange(n) / n
    made: dict[str, Curve] = {
        "sudden": 1 + 6 * np.exp(-t / 0.04) + 1.5 * np.maximum(0, t - 0.4) / 0.6,
        "gentle": 1 + 4 * np.maximum(0, (0.15 - t) / 0.15) + 2 * np.maximum(0, t - 0.5) / 0.5,
        "brief": 1 + 9 * np.maximum(0, (0.02 - t) / 0.02) + 4 * np.maximum(0, (t - 0.3) / 0.7),
        "mild": 1 + np.maximum(0, (0.3 - t) / 0.3) + np.maximum(0, (t - 0.6) / 0.4),
        "decay": 1 + 6 * np.exp(-t / 0.1),
        "decay, then flat": 1 + 6 * np.exp(-t / 0.03),
        "slow decay": 3 - 2 * t,
        "halves": 1 + np.maximum(0, (0.3 - t) / 0.3),
        "growth": 1 + 2 * t,
        "late growth": 3 * np.exp(2 * (t - 1)),
        "doubles": 1 + np.maximum(0, (t - 0.6) / 0.4),
        "hill": 1 + 2 * np.minimum(t / 0.6, (1 - t) / 0.4),
        "flat": np.ones(n),
        "nothing": np.zeros(n),
    }
    return made[kind]


def noisy(kind: str, seed: int, n: int = STEPS, noise: float = NOISE) -> Curve:
    """The curve times noise that is even in its logarithm, as the sizes of influences have it."""
    return np.asarray(curve(kind, n) * np.exp(noise * np.random.default_rng(seed).standard_normal(n)))


def lifted(kind: str, seed: int, n: int, noise: float) -> Curve:
    """The curve and white noise of one size."""
    return np.asarray(curve(kind, n) + noise * np.random.default_rng(seed).standard_normal(n))


@pytest.mark.parametrize("kind", SHAPES)
def test_planted_patterns_are_found_at_the_noise_of_the_demo(kind: str) -> None:
    actual = [phases(noisy(kind, seed)).shape for seed in range(4)]
    assert actual == 4 * [SHAPES[kind]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_of_100_planted_patterns_95_are_found_and_of_100_noises_5_are_called_one(kind: str) -> None:
    actual = [phases(noisy(kind, seed)).shape for seed in range(1000, 1100)]
    assert actual.count(SHAPES[kind]) >= 95, f"{kind}: {sorted(set(actual))}, {actual.count(SHAPES[kind])} as planted"


@pytest.mark.slow
@pytest.mark.parametrize("tails", [2, 3])
def test_the_same_with_heavy_tails(tails: int) -> None:
    for kind, shape in SHAPES.items():
        draws = [np.random.default_rng(seed).standard_t(tails, STEPS) for seed in range(2000, 2100)]
        actual = [phases(curve(kind) * np.exp(0.6 * NOISE * z)).shape for z in draws]
        assert actual.count(shape) >= 95, f"{kind}: {actual.count(shape)} as planted"


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("n", [100, 600])
@pytest.mark.parametrize("kind", ["sudden", "gentle"])
def test_phases_have_boundaries_and_windows(kind: str, n: int, noise: float) -> None:
    for seed in range(2):
        actual = phases(lifted(kind, seed, n, noise))
        assert actual.present, f"{kind}, seed {seed}: {actual.words}"
        end, start = actual.warm_up.boundary, actual.ascent.boundary
        assert end is not None
        assert start is not None
        assert 0.02 * n <= end <= 0.2 * n, f"the warm-up is said to end at {end} of {n}"
        assert 0.25 * n <= start <= 0.65 * n, f"the ascent is said to begin at {start} of {n}"
        assert f"a fall until step {end}, a low stretch until step {start}" in actual.words
        assert [(w.name, w.first == 0, w.last == n) for w in actual.windows] == [
            ("early", True, False), ("late", False, True),
        ]  # fmt: skip
        assert all((w.times_basin or 0) > 1.2 and w.last - w.first <= n / 2 for w in actual.windows)


@pytest.mark.parametrize("kind", ["decay", "growth", "hill", "flat", "nothing"])
def test_without_the_three_phases_there_is_no_advice_and_no_multiple_of_chance(kind: str) -> None:
    actual = phases(noisy(kind, 0))
    assert not actual.present
    assert (actual.windows, actual.basin, actual.warm_up.boundary, actual.ascent.boundary) == ((), None, None, None)
    assert not any(word in actual.words for word in ("chance", "times", "until"))
    assert (actual.warm_up.present, actual.ascent.present) == (actual.shape == "falls", actual.shape == "rises")


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("n", [100, 600])
@pytest.mark.parametrize(
    "kind", ["flat", "nothing", "decay", "decay, then flat", "slow decay", "growth", "late growth"]
)
def test_phases_are_not_found_where_they_are_not(kind: str, n: int, noise: float) -> None:
    for seed in range(2):
        actual = phases(lifted(kind, seed, n, noise))
        assert not actual.present, f"{kind}, seed {seed}: {actual.words}"


@pytest.mark.parametrize("kind", ["gentle", "decay", "growth", "flat"])
@pytest.mark.parametrize("wild", [-400.0, 400.0])
def test_one_wild_last_step_decides_nothing(kind: str, wild: float) -> None:
    y = noisy(kind, 0)
    y[-1] = wild
    assert phases(y).shape == SHAPES[kind] == phases(y[:-1]).shape == phases(y[:-32]).shape


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_what_only_the_last_steps_show_is_no_clear_pattern(factor: float) -> None:
    y = noisy("flat", 0)
    y[-28:] *= factor
    assert phases(y).shape == "no clear pattern"
    y[-100:-28] *= factor
    assert phases(y).shape == ("falls" if factor < 1 else "rises")


def test_what_only_odd_sized_batches_show_is_no_clear_pattern() -> None:
    y, samples = noisy("flat", 0), np.full(STEPS, 64)
    y[:40] *= 2
    assert phases(y, samples=samples).shape == phases(y).shape == "falls"
    samples[:40] = 32
    assert phases(y, samples=samples).shape == "no clear pattern"
    samples[40:100] = 16
    assert phases(y, samples=samples).shape == "falls", "sizes that vary by design are not left out"


def spiked(place: str, seed: int, n: int) -> tuple[Curve, NDArray[np.int64]]:
    """A flat curve with few steps, all neighbours, far from it; epochs of 15 steps, the last of 2 samples where others have 32."""
    y, samples = noisy("flat", seed, n), np.full(n, 32)
    epochs = np.arange(14, n, 15)
    samples[epochs] = 2
    y[epochs] *= np.exp(np.random.default_rng(seed).standard_normal(len(epochs)))
    if place == "the end of an epoch":
        y[epochs[len(epochs) // 2]] *= 200
    else:
        count, factor = {"three steps": (3, 20.0), "a bin": (5, 20.0), "a low bin": (5, 0.05)}[place]
        first = 5 * (seed % (n // 5))
        y[first : first + count] *= factor
    return y, samples


@pytest.mark.parametrize("n", [60, 90, 150])
@pytest.mark.parametrize("place", ["the end of an epoch", "three steps", "a bin", "a low bin"])
def test_what_few_steps_show_is_no_clear_pattern(place: str, n: int) -> None:
    curves = [spiked(place, seed, n) for seed in range(20)]
    actual = [phases(y, samples=samples).shape for y, samples in curves]
    assert actual.count("no clear pattern") >= 0.95 * len(actual), sorted(set(actual))


@pytest.mark.parametrize("seed", range(10))
def test_one_wild_step_of_a_short_run_is_no_pattern(seed: int) -> None:
    for n in (20, 30, 59):
        y = noisy("flat", seed, n)
        y[seed * n // 10] *= 200
        assert phases(y).words.startswith("No clear pattern")


def test_noise_that_grows_is_no_pattern() -> None:
    """As that of means with their sign: 80 times as large at the end as at the beginning."""
    growth = np.exp(4.4 * np.arange(STEPS) / STEPS)
    actual = [phases(3 + growth * np.random.default_rng(seed).standard_t(4, STEPS)).shape for seed in range(20)]
    assert actual.count("no clear pattern") >= 19


def test_a_rise_in_a_quiet_part_is_found_beside_a_noisy_one() -> None:
    t = np.arange(STEPS) / STEPS
    rise = np.minimum(4 * t, 1)
    actual = [
        phases(rise + 0.1 * np.exp(4.4 * t) * np.random.default_rng(seed).standard_normal(STEPS)).shape
        for seed in range(4)
    ]
    assert actual == 4 * ["rises"]


def test_a_small_rise_is_no_phase_however_certain() -> None:
    t = np.arange(3000) / 3000
    y = 1 + 4 * np.exp(-t / 0.03) + 0.1 * np.maximum(0, t - 0.5) + 0.01 * np.random.default_rng(0).standard_normal(3000)
    actual = phases(y)
    assert actual.ascent.p < 0.001
    assert actual.shape == "falls"


def test_the_same_seed_gives_the_same_answer_and_nothing_else_is_drawn() -> None:
    y = lifted("flat", 1, 300, 1.0)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert phases(y) == phases(y)
    assert phases(y, seed=1).warm_up.p != phases(y).warm_up.p
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_units_do_not_matter() -> None:
    y = noisy("sudden", 2)
    one, other = phases(y), phases(2.0**-60 * y)
    assert (one.warm_up.boundary, one.ascent.boundary) == (other.warm_up.boundary, other.ascent.boundary)
    assert (one.warm_up.p, one.ascent.p) == (other.warm_up.p, other.ascent.p)


@pytest.mark.parametrize("level", [0.1, 1 / 3, -0.7, 1e-9, 0.0])
def test_rounding_is_no_pattern(level: float) -> None:
    actual = phases(np.full(600, level) * (1 + 1e-15 * np.random.default_rng(0).standard_normal(600)))
    assert actual.shape == "no clear pattern"
    assert min(actual.warm_up.p, actual.ascent.p) > 0.5


def test_steps_without_a_number_are_left_out() -> None:
    y = lifted("gentle", 0, 400, 0.1)
    y[:40:7] = np.nan
    y[200:220] = np.nan
    assert phases(y).present


@pytest.mark.slow
@pytest.mark.parametrize(("n", "noise"), [(600, 0.2), (600, 1.0), (100, 0.5)])
def test_how_often_phases_are_wrongly_present(n: int, noise: float) -> None:
    """Of many seeded curves, few are named otherwise than they were planted."""
    for kind in (
        "sudden",
        "gentle",
        "flat",
        "nothing",
        "decay",
        "decay, then flat",
        "slow decay",
        "growth",
        "late growth",
    ):
        share = np.mean([phases(lifted(kind, seed, n, noise)).present for seed in range(100)])
        assert share >= 0.9 if SHAPES.get(kind) == "three phases" else share <= 0.02, f"{kind}: present in {share:.0%}"


def test_short_runs_and_wrong_arguments() -> None:
    actual: Phases = phases(noisy("growth", 0, 59))
    assert actual.shape == "too short"
    assert "No clear pattern: 59 steps are too few" in actual.words
    assert actual.as_dict()["windows"] == []
    with pytest.raises(UsageError, match="one number per step"):
        phases(np.ones((4, 4)))
    with pytest.raises(UsageError, match="samples \\(3,\\)"):
        phases(np.ones(40), samples=[1, 2, 3])
    with pytest.raises(UsageError, match="draws at least 99"):
        phases(np.ones(40), draws=10)


def tilted(n: int, seed: int) -> Curve:
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
    y, w = tilted(n, seed), weights(n, seed)
    np.testing.assert_allclose(rising(y, w), isotonic(y, w, True), atol=1e-12)
    np.testing.assert_allclose(falling(y, w), isotonic(y, w, False), atol=1e-12)
    prefixes = [distance(y[:k], w[:k], True) for k in range(n + 1)]
    np.testing.assert_allclose(prefix_errors(y.tolist(), w.tolist()), prefixes, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_closest_valley_and_hill_are_the_best_of_all_turns(seed: int) -> None:
    y, w = tilted(20, seed), weights(20, seed)
    actual = errors(y, w)
    for turned, error, fit in ((False, actual.valley, valley(y, w)), (True, actual.hill, hill(y, w))):
        every = [distance(y[:c], w[:c], turned) + distance(y[c:], w[c:], not turned) for c in range(len(y) + 1)]
        assert error == pytest.approx(min(every), abs=1e-12)
        assert float((w * (y - fit) ** 2).sum()) == pytest.approx(error, abs=1e-12)
    assert actual.rising == pytest.approx(distance(y, w, True), abs=1e-12)
    assert actual.falling == pytest.approx(distance(y, w, False), abs=1e-12)


def test_the_corners_of_a_curve_that_has_them_are_found() -> None:
    x = np.arange(40.0)
    y = 2 + 3 * np.maximum(0, 1 - x / 8) + 1.5 * np.maximum(0, (x - 25) / 14)
    assert corners(y, np.ones(40)) == (8, 26), "the first that is above the level"


def test_what_weighs_nothing_moves_no_corner() -> None:
    x = np.arange(40.0)
    y, w = 2 + 3 * np.maximum(0, 1 - x / 8) + 1.5 * np.maximum(0, (x - 25) / 14), np.ones(40)
    y[[3, 15, 30]], w[[3, 15, 30]] = 50.0, 1e-12
    assert corners(y, w) == (8, 26)


def test_a_hill_has_no_such_corners() -> None:
    assert corners(-np.abs(np.linspace(-1, 1, 30)), np.ones(30)) == (0, 30)
