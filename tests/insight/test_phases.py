"""The three phases on synthetic curves that have them and on curves that do not."""

import numpy as np
import pytest

from backstory.errors import UsageError
from backstory.insight.phases import Phases, phases
from backstory.insight.shapes import Curve

PHASES = ("sudden", "gentle")
WITHOUT = ("flat", "nothing", "decay", "decay, then flat", "slow decay", "growth", "late growth")


def curve(kind: str, n: int) -> Curve:
    t = np.arange(n) / n
    made: dict[str, Curve] = {
        "sudden": 1 + 6 * np.exp(-t / 0.04) + 1.5 * np.maximum(0, t - 0.4) / 0.6,
        "gentle": 1 + 4 * np.maximum(0, (0.15 - t) / 0.15) + 2 * np.maximum(0, t - 0.5) / 0.5,
        "flat": np.ones(n),
        "nothing": np.zeros(n),
        "decay": 1 + 6 * np.exp(-t / 0.1),
        "decay, then flat": 1 + 6 * np.exp(-t / 0.03),
        "slow decay": 3 - 2 * t,
        "growth": 1 + 2 * t,
        "late growth": 3 * np.exp(2 * (t - 1)),
    }
    return made[kind]


def noisy(kind: str, n: int, noise: float, seed: int) -> Curve:
    """White noise; its size follows the curve's where `noise` is negative."""
    base = curve(kind, n)
    return np.asarray(base + abs(noise) * np.random.default_rng(seed).standard_normal(n) * (base if noise < 0 else 1))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, -0.3])
@pytest.mark.parametrize("n", [100, 600])
@pytest.mark.parametrize("kind", PHASES)
def test_phases_are_found_where_they_are(kind: str, n: int, noise: float) -> None:
    for seed in range(3):
        found = phases(noisy(kind, n, noise, seed))
        assert found.present, f"{kind}, seed {seed}: {found.words}"
        end, start = found.warm_up.boundary, found.ascent.boundary
        assert end is not None
        assert start is not None
        assert 0.02 * n <= end <= 0.2 * n, f"the warm-up is said to end at {end} of {n}"
        assert (0.25 if kind == "sudden" else 0.35) * n <= start <= 0.65 * n, (
            f"the ascent is said to begin at {start} of {n}"
        )
        assert [w.name for w in found.windows] == ["early", "late"]
        assert all((w.times_basin or 0) > 1.2 for w in found.windows)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.5, -0.3])
@pytest.mark.parametrize("n", [100, 600])
@pytest.mark.parametrize("kind", WITHOUT)
def test_phases_are_not_found_where_they_are_not(kind: str, n: int, noise: float) -> None:
    for seed in range(3):
        found = phases(noisy(kind, n, noise, seed))
        assert not found.present, f"{kind}, seed {seed}: {found.words}"
        assert found.words.startswith("not present")
        assert found.warm_up.statistic <= 1 or found.ascent.statistic <= 1


@pytest.mark.parametrize(
    ("kind", "shape", "windows"),
    [
        ("decay, then flat", "falls", ["early"]),
        ("slow decay", "falls", ["early"]),
        ("growth", "rises", ["late"]),
        ("flat", "flat", []),
    ],
)
def test_half_of_the_phases_is_named(kind: str, shape: str, windows: list[str]) -> None:
    found = phases(noisy(kind, 600, 0.2, 0))
    assert found.shape == shape
    assert [w.name for w in found.windows] == windows
    assert (found.warm_up.boundary is not None) == ("early" in windows)
    assert (found.ascent.boundary is not None) == ("late" in windows)
    for w in found.windows:
        assert w.last - w.first <= 300, "a window that is most of the run is none"
        assert (w.first == 0) == (w.name == "early")
        assert (w.last == 600) == (w.name == "late")


def test_a_small_rise_is_no_phase_however_certain() -> None:
    t = np.arange(3000) / 3000
    y = 1 + 4 * np.exp(-t / 0.03) + 0.1 * np.maximum(0, t - 0.5) + 0.01 * np.random.default_rng(0).standard_normal(3000)
    found = phases(y)
    assert found.ascent.statistic > 1
    assert not found.ascent.present
    assert found.shape == "falls"


def test_the_same_seed_gives_the_same_answer() -> None:
    y = noisy("gentle", 300, 0.8, 1)
    assert phases(y) == phases(y)
    assert phases(y, seed=1).warm_up.statistic != phases(y).warm_up.statistic


def test_units_do_not_matter() -> None:
    y = noisy("sudden", 300, 0.3, 2)
    one, other = phases(y), phases(1e-7 * y)
    assert (one.warm_up.boundary, one.ascent.boundary) == (other.warm_up.boundary, other.ascent.boundary)
    assert one.ascent.statistic == pytest.approx(other.ascent.statistic, rel=1e-6)


@pytest.mark.parametrize("level", [0.1, 1 / 3, -0.7, 1e-9, 0.0])
def test_rounding_is_no_phase(level: float) -> None:
    found = phases(np.full(600, level) * (1 + 1e-15 * np.random.default_rng(0).standard_normal(600)))
    assert found.shape == "flat"
    assert found.warm_up.statistic < 1
    assert found.ascent.statistic < 1


def test_steps_without_a_number_are_left_out() -> None:
    y = noisy("gentle", 400, 0.1, 0)
    y[:40:7] = np.nan
    y[200:220] = np.nan
    assert phases(y).present


@pytest.mark.slow
@pytest.mark.parametrize(("n", "noise"), [(600, 0.2), (600, 1.0), (600, -0.5), (100, 0.5)])
def test_how_often_it_is_wrong(n: int, noise: float) -> None:
    """100 seeds; the table of docs/insight.md."""
    for kind in (*PHASES, *WITHOUT):
        share = np.mean([phases(noisy(kind, n, noise, seed), draws=199).present for seed in range(100)])
        assert share >= 0.97 if kind in PHASES else share <= 0.04, f"{kind}: present in {share:.0%}"


def test_short_runs_and_wrong_arguments() -> None:
    found: Phases = phases(np.ones(19))
    assert found.shape == "too short"
    assert "19 steps are too few" in found.words
    assert found.as_dict()["windows"] == ()
    with pytest.raises(UsageError, match="one number a step"):
        phases(np.ones((4, 4)))
    with pytest.raises(UsageError, match="99 draws"):
        phases(np.ones(40), draws=10)
