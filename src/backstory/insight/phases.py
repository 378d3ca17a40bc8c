r"""The three phases of training that the paper describes, or a number that says they are not there.

High-impact warm-up, low-impact basin, gradual ascent: in time, average influence falls, and later rises. Two questions decide:

    fall = error of the closest rising curve  − error of the closest valley         larger than chance?
    rise = error of the closest falling curve − error of the closest valley         larger than chance?

Both must be: a curve that only falls, only rises or does neither has no phases. Chance is what the same differences are for noise
alone, which of all rising (falling) curves with that noise are the largest. The noise is drawn anew, normal, as large at
each place as what the closest valley leaves over around it (averaged over `NEAR` bins on either side, and enlarged for the
`USED` values that the fit has taken), and with its correlation from bin to bin. A statistic is the difference over the 0.99 quantile of
`DRAWS` draws: above 1, it is not chance.

What is certain may still be small: the fall (rise) must also be `LEAST` of the basin's level. The warm-up ends, and the ascent begins,
where the closest curve of a straight fall, a level and a straight rise has its corners.

Steps are averaged in `BINS` bins, so that noise which lasts a few steps is averaged out; a boundary is known to a bin.
Knows nothing of runs: one number for each step in, phases out.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from .shapes import Curve, Ramps, errors, ramps, valley

DRAWS = 499  # of noise
CERTAIN = 0.99  # quantile of chance that must be passed
LEAST = 0.25  # of the basin's level: what a phase must lie above it
BINS = 50
FEWEST = 20  # steps, below which nothing can be told
NEAR = 10  # bins on either side over which the size of the noise is averaged
USED = 14  # values that the closest valley has taken from the noise, about
LONGEST = 0.9  # correlation of the noise of neighbouring bins that is followed
LARGEST = 1e6  # statistic that is told apart
ROUNDING = 1e-12  # of Σ y²: a difference below it is none
SHAPES = {(True, True): "three phases", (True, False): "falls", (False, True): "rises", (False, False): "flat"}
WITHOUT = {
    "falls": "influence falls, and does not rise again",
    "rises": "influence rises, and has not fallen before",
    "flat": f"influence stays level, to {LEAST:.0%}",
}
Chance = tuple[float, float]  # statistic, p


@dataclass(frozen=True)
class Side:
    """One side of the valley: the fall of the warm-up, or the rise of the ascent."""

    present: bool
    statistic: float  # over what chance does in 99 of 100 cases; above 1: not chance
    p: float  # how often chance does as much
    level: float | None  # mean of the phase, None where nothing was found
    boundary: int | None  # the step at which the warm-up ends, or the ascent begins


@dataclass(frozen=True)
class Window:
    """Steps first … last−1 in which data selection pays: a phase, or its half of the run. How high influence is there."""

    name: str  # "early" or "late"
    first: int
    last: int
    level: float
    times_basin: float | None  # None where the level of the closest curve between the phases is not positive


@dataclass(frozen=True)
class Phases:
    """Whether the three phases are there, and where."""

    present: bool
    shape: str  # "three phases", "falls", "rises", "flat", or "too short"
    warm_up: Side
    ascent: Side
    basin: float | None  # its mean level
    windows: tuple[Window, ...]
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "words": self.words}

    @property
    def words(self) -> str:
        """The finding in one sentence."""
        if self.shape == "too short":
            return f"not present: {self.steps} steps are too few to tell; at least {FEWEST} are needed."
        times = f"{self.warm_up.statistic:.3g} times, the rise {self.ascent.statistic:.3g} times"
        said = f"The fall is {times} what chance alone gives in 99 of 100 cases; above 1 it is no chance."
        if self.present:
            first, last = self.warm_up.boundary, self.ascent.boundary
            return f"warm-up until step {first}, basin until step {last}, then ascent. {said}"
        return f"not present: {WITHOUT[self.shape]}. {said}"


ABSENT = Side(False, 0.0, 1.0, None, None)


def phases(values: Curve, *, seed: int = 0, draws: int = DRAWS) -> Phases:
    """Phases of a curve with one number for each step; steps without one (NaN) are left out."""
    if values.ndim != 1 or draws < 99:
        raise UsageError(
            f"found values {values.shape} and draws={draws}; expected one number a step, and 99 draws or more."
        )
    steps = np.flatnonzero(np.isfinite(values))
    if len(steps) < FEWEST:
        return Phases(False, "too short", ABSENT, ABSENT, None, (), len(values))
    parts = np.array_split(steps, min(BINS, len(steps)))
    y = np.array([values[part].mean() for part in parts])
    edges = np.array([*(part[0] for part in parts), len(values)])
    return _found(y, edges, *_chances(y, seed, draws))


def _chances(y: Curve, seed: int, draws: int) -> tuple[Chance, Chance]:
    """Of the fall and of the rise."""
    found, chance = errors(y), [errors(z) for z in noise(y, seed, draws)]
    least = max(ROUNDING * float(y @ y), 1e-300)
    fall = _compared(found.rising - found.valley, [e.rising - e.valley for e in chance], least)
    return fall, _compared(found.falling - found.valley, [e.falling - e.valley for e in chance], least)


def noise(y: Curve, seed: int, draws: int) -> Curve:
    """Noise like that of `y` around its valley, (draws, n): its size at each place, and how long it lasts."""
    left = y - valley(y)
    square = np.pad(left**2, NEAR, mode="reflect")
    size = np.sqrt(np.convolve(square, np.full(2 * NEAR + 1, 1 / (2 * NEAR + 1)), "valid") * len(y) / (len(y) - USED))
    lasts = float(np.clip((left[1:] @ left[:-1]) / max(float(left @ left), 1e-300), 0.0, LONGEST))
    fresh = np.random.default_rng(seed).standard_normal((draws, len(y)))
    for j in range(1, len(y)):
        fresh[:, j] = lasts * fresh[:, j - 1] + np.sqrt(1 - lasts**2) * fresh[:, j]
    return fresh * size


def _compared(found: float, chance: list[float], least: float) -> Chance:
    threshold = max(float(np.quantile(chance, CERTAIN)), least)
    return min(found / threshold, LARGEST), (1 + sum(x >= found for x in chance)) / (1 + len(chance))


def _found(y: Curve, edges: Curve, fall: Chance, rise: Chance) -> Phases:
    fit = ramps(y, falls=fall[0] > 1, rises=rise[0] > 1)
    basin = float(y[fit.end : fit.start].mean()) if fit.start > fit.end else fit.level
    warm_up = _side(y[: fit.end], fall, fit.fall, fit.level, int(edges[fit.end]))
    ascent = _side(y[fit.start :], rise, fit.rise, fit.level, int(edges[fit.start]))
    shape = SHAPES[warm_up.present, ascent.present]
    return Phases(
        shape == "three phases", shape, warm_up, ascent, basin, _windows(y, edges, fit, warm_up, ascent), int(edges[-1])
    )


def _windows(y: Curve, edges: Curve, fit: Ramps, warm_up: Side, ascent: Side) -> tuple[Window, ...]:
    """The warm-up and the ascent, neither beyond the middle of the run."""
    half = len(y) // 2
    parts = [("early", 0, min(fit.end, half), warm_up), ("late", max(fit.start, half), len(y), ascent)]
    return tuple(
        Window(name, int(edges[lo]), int(edges[hi]), float(y[lo:hi].mean()), _times(float(y[lo:hi].mean()), fit.level))
        for name, lo, hi, side in parts
        if side.present
    )


def _times(level: float, basin: float) -> float | None:
    return level / basin if basin > 0 else None


def _side(y: Curve, chance: Chance, height: float, level: float, boundary: int) -> Side:
    if not len(y):
        return Side(False, *chance, None, None)
    far = height >= LEAST * abs(level)
    return Side(far, *chance, float(y.mean()), boundary if far else None)
