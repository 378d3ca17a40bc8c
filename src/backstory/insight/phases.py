r"""The three phases of training that the paper describes, or another pattern over time, or none that is clear.

High-impact warm-up, low-impact basin, gradual ascent: in time, influence falls, stays low, and later rises. With the closest curves of each
shape to the medians y of `BINS` bins of steps, weighted by their precision, two questions decide:

    fall = (error of the closest rising curve  − least) / noise                     larger than noise alone gives?
    rise = (error of the closest falling curve − least) / noise                     larger than noise alone gives?

where `least` is the error of the closest valley or hill, whichever is closer. Both: three phases (a valley), or a hill. One: the
curve only falls, or only rises. A bin's variance is (π/2) σ²/n, σ from the median jump from one step to the next around it, so that
a few wild steps count for little and a part of the run that is noisier counts for less; `noise` is 1, or larger where the closest curve is
left further than that. What noise alone gives are `DRAWS` seeded draws of as many steps of normal noise around a level: of all
curves without a fall (rise) the one that imitates it most often. A fall or rise counts at p ≤ `CERTAIN` and if it is `LEAST` of the lower level.

A pattern is told only if it is the same without the last 1, 5 and 10 % of the steps, without the batches of another size than most, and
without the few highest or lowest steps, so that it never rests on `EACH` steps; else there is no clear pattern. With steps left out, the falls
and rises of all steps count at p ≤ `LIKELY`. Only the three phases have boundaries, levels and periods of high influence (`windows`): the
warm-up ends, and the ascent begins, where the closest curve of a straight fall, a level and a straight rise has its corners.

The closest rising curve (f₁ ≤ f₂ ≤ …) to values y in Σ w (y − f)² is found by pooling: from left to right, neighbouring blocks
whose means stand in the wrong order become one block with their common mean. The error of every prefix comes along, so that
the closest valley (falling up to some place, rising from it on) needs one pass from either side:

    error of the valley = min over c of  falling error of y[:c]  +  rising error of y[c:]

A hill is a valley turned over.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..results.row import Row

DRAWS = 999  # of noise
CERTAIN = 0.005  # the largest p at which a fall or a rise counts
LIKELY = 0.02  # the same where it counts, and some of the steps are left out
LEAST = 0.25  # of the lower level: the smallest fall or rise that counts
LEFT_OUT = (0.0, 0.01, 0.05, 0.1)  # of the steps, at the end: a pattern must be the same without them
RARE = 0.2  # of the steps: where more have another number of samples than most, sizes vary by design
FEWEST = 60  # steps, below which nothing can be told: too few bins of `EACH`
EACH, BINS = 5, 40  # steps in a bin at least, and bins at most
MANY = 10  # steps in a bin: with more, noise gives the same
NEAR = 4  # bins on either side of one in which its noise is measured
JUMP = 0.9539  # median |difference| of two standard normal numbers
QUIET = 1e-3  # of the run's middling noise: the smallest that is believed of a part
ROUNDING = 1e-9  # of the middling value: noise below it is none
PHASES, HILL, FALLS, RISES, NONE, SHORT = (
    "three phases", "rises, then falls", "falls", "rises", "no clear pattern", "too short",
)  # fmt: skip
NAMES = {(True, False): FALLS, (False, True): RISES, (False, False): NONE}  # of (falls, rises)
SURE = (
    f"(p ≤ {CERTAIN:g} assuming independent noise from step to step; p ≤ {LIKELY:g} without the last {LEFT_OUT[-1]:.0%} "
    "of steps)"
)
WORDS = {
    FALLS: f"Influence per unit of learning rate falls during training {SURE}.",
    RISES: f"Influence per unit of learning rate rises during training {SURE}.",
    HILL: f"Influence per unit of learning rate rises and then falls during training {SURE}.",
    NONE: f"No clear pattern: influence per unit of learning rate shows no rise or fall of {LEAST:.0%} or more that "
    "stands out from the noise and persists without the last or the most extreme steps.",
}
Curve = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True)
class Side(Row):
    """One side of the valley: the fall of the warm-up, or the rise of the ascent."""

    present: bool
    p: float  # how often noise alone does as much; the largest of all tests
    level: float | None  # median of the phase; None without three phases, as the boundary
    boundary: int | None  # the step at which the warm-up ends, or the ascent begins


@dataclass(frozen=True)
class Window(Row):
    """A period of high influence, steps first … last−1: the warm-up or the ascent, or its half of the run."""

    name: str  # "early" or "late"
    first: int
    last: int
    level: float
    times_basin: float | None  # None where the basin's level is not positive


@dataclass(frozen=True)
class Phases(Row):
    """Whether and where the three phases occur; otherwise the pattern, if there is a clear one."""

    present: bool
    shape: str  # "three phases", "rises, then falls", "falls", "rises", "no clear pattern" or "too short"
    warm_up: Side
    ascent: Side
    basin: float | None  # its median level
    windows: tuple[Window, ...]  # periods of high influence; not the windows of a compressed run
    steps: int

    def bands(self) -> tuple[tuple[str, int, int], ...]:
        """`(name, first step, step after the last)` of each of the three phases; none where they are not there."""
        first, last = self.warm_up.boundary, self.ascent.boundary
        if not self.present or first is None or last is None:
            return ()
        whole = (("fall", 0, first), ("low", first, last), ("rise", last, self.steps))
        return tuple(band for band in whole if band[2] > band[1])

    @property
    def words(self) -> str:
        """The pattern in one sentence."""
        if self.shape == SHORT:
            return f"No clear pattern: {self.steps} steps are too few (at least {FEWEST} are needed)."
        if self.present:
            first, last = self.warm_up.boundary, self.ascent.boundary
            return f"Three phases: a fall until step {first}, a low stretch until step {last}, then a rise {SURE}."
        return WORDS[self.shape]


class Tried(NamedTuple):
    """The pattern of some of the steps."""

    shape: str
    fall: float  # p
    rise: float  # p


class Chance(NamedTuple):
    """What noise alone gives."""

    left: float  # mean error of the closest valley or hill
    gains: Curve  # falls and rises, sorted


class Block(NamedTuple):
    """Neighbours with one mean."""

    size: int
    weight: float
    mean: float
    error: float  # Σ w (y − mean)²


class Errors(NamedTuple):
    """Σ w (y − f)² of the closest curve of each shape."""

    falling: float
    rising: float
    valley: float
    hill: float


def phases(values: Curve, *, samples: Any = None, seed: int = 0, draws: int = DRAWS) -> Phases:
    """The pattern of a curve with one value per step; `samples` is the batch size of each step. Steps with NaN are left out."""
    if values.ndim != 1 or draws < 99 or (samples is not None and np.shape(samples) != values.shape):
        raise UsageError(
            "values must be one number per step, samples the same shape or None, and draws at least 99, got values "
            f"{values.shape}, samples {None if samples is None else np.shape(samples)} and draws={draws}."
        )
    steps = np.flatnonzero(np.isfinite(values))
    if len(steps) < FEWEST:
        return _without(SHORT, 1.0, 1.0, len(values))
    parts = _parts(steps, samples)
    bins = min(BINS, min(len(part) for part in parts) // EACH)
    each = len(steps) // bins
    noise = chance(bins, min(each, MANY), seed, draws)
    few = max(0, EACH - (each - 1) // 2)  # without as many, `EACH` wild steps are too few to move a bin's median
    parts += [rest for whole in parts[:: len(LEFT_OUT)] for rest in _without_extremes(values, whole, few)]
    whole = _tried(values[steps], bins, noise)
    tried = [_tried(values[part], bins, noise, whole.shape) for part in parts]
    shape = whole.shape if {one.shape for one in tried} == {whole.shape} else NONE
    fall, rise = max(one.fall for one in tried), max(one.rise for one in tried)
    if shape == PHASES:
        return _located(values, steps, bins, fall, rise)
    return _without(shape, fall, rise, len(values))


def _without(shape: str, fall: float, rise: float, steps: int) -> Phases:
    """A curve without the three phases has no basin, no boundaries, and no periods of high influence."""
    warm_up, ascent = Side(shape == FALLS, fall, None, None), Side(shape == RISES, rise, None, None)
    return Phases(False, shape, warm_up, ascent, None, (), steps)


def _parts(steps: Steps, samples: Any) -> list[Steps]:
    """All steps, and those of one size of batch; and of either what is left without the last ones."""
    wholes = [steps]
    if samples is not None:
        counts = np.asarray(samples)[steps]
        sizes, often = np.unique(counts, return_counts=True)
        if 0 < 1 - often.max() / len(steps) <= RARE:
            wholes.append(steps[counts == sizes[often.argmax()]])
    return [whole[: len(whole) - math.ceil(share * len(whole))] for whole in wholes for share in LEFT_OUT]


def _without_extremes(values: Curve, part: Steps, few: int) -> list[Steps]:
    """A part without its `few` highest steps, and without its lowest; none where a bin's median is safe from `EACH` wild steps."""
    order = np.argsort(values[part], kind="stable")
    return [part[np.sort(some)] for some in (order[few:], order[:-few])] if few else []


def _tried(values: Curve, bins: int, noise: Chance, before: str = NONE) -> Tried:
    """The pattern of some steps; the fall and the rise of the pattern of all of them, `before`, only have to be likely."""
    y, w = binned(values, bins)
    fits = errors(y, w)
    fall, rise = (_p(gain, noise) for gain in _gains(fits, noise.left))
    is_valley = fits.valley <= fits.hill
    fit = valley(y, w) if is_valley else hill(y, w)
    turn = float(fit.min() if is_valley else fit.max())
    first, last = (_far(float(end), turn) for end in (fit[0], fit[-1]))
    falls = fall <= (LIKELY if before in (PHASES, HILL, FALLS) else CERTAIN) and (first if is_valley else last)
    rises = rise <= (LIKELY if before in (PHASES, HILL, RISES) else CERTAIN) and (last if is_valley else first)
    return Tried(NAMES.get((falls, rises), PHASES if is_valley else HILL), fall, rise)


def _far(one: float, other: float) -> bool:
    """Whether two levels differ by `LEAST` of the lower one."""
    return abs(one - other) >= LEAST * abs(min(one, other))


def _gains(fits: Errors, left: float) -> tuple[float, float]:
    """The fall and the rise: how much closer the best valley or hill comes than a curve without them."""
    least = min(fits.valley, fits.hill)
    noise = max(1.0, least / left)
    return (fits.rising - least) / noise, (fits.falling - least) / noise


def _p(gain: float, noise: Chance) -> float:
    return float(1 + len(noise.gains) - np.searchsorted(noise.gains, gain)) / (1 + len(noise.gains))


@lru_cache(maxsize=32)
def chance(bins: int, each: int, seed: int, draws: int) -> Chance:
    """Normal noise around a level, `each` steps to a bin: the same for every curve, for gains have no unit."""
    y, w = binned(np.random.default_rng(seed).standard_normal((draws, bins * each)), bins)
    fits = [errors(*one) for one in zip(y, w, strict=True)]
    left = float(np.mean([min(e.valley, e.hill) for e in fits]))
    return Chance(left, np.sort([gain for e in fits for gain in _gains(e, left)]))


def binned(values: Curve, bins: int) -> tuple[Curve, Curve]:
    """`(medians of bins of neighbouring values, their precisions)` along the last axis, in units of the middling value."""
    sizes = np.abs(values)
    unit = np.where(np.median(sizes, -1) > 0, np.median(sizes, -1), sizes.max(-1))[..., None]
    values = values / np.where(unit > 0, unit, 1.0)
    jumps, parts = np.abs(np.diff(values)), np.array_split(np.arange(values.shape[-1]), bins)
    floor = np.maximum(QUIET * np.median(jumps, -1), ROUNDING)
    around = [(parts[max(0, b - NEAR)][0], parts[min(bins - 1, b + NEAR)][-1]) for b in range(bins)]
    sigma = np.stack([np.maximum(np.median(jumps[..., lo:hi], -1), floor) for lo, hi in around], -1) / JUMP
    middles = np.stack([np.median(values[..., part], -1) for part in parts], -1)
    return middles, np.array([len(part) for part in parts]) / (math.pi / 2 * sigma**2)


def _located(values: Curve, steps: Steps, n: int, fall: float, rise: float) -> Phases:
    """The three phases in n bins: boundaries, levels, and the periods of high influence, neither beyond the middle of the run."""
    T = len(values)
    fit = corners(*binned(values[steps], n))
    edges = [int(part[0]) for part in np.array_split(steps, n)]
    end, start, half = edges[max(fit[0], 1)], edges[min(fit[1], n - 1)], edges[n // 2]
    levels = [float(np.nanmedian(values[lo:hi])) for lo, hi in ((0, end), (end, start), (start, T))]
    basin, windows = levels[1], []
    for name, lo, hi in (("early", 0, min(end, half)), ("late", max(start, half), T)):
        level = float(np.nanmedian(values[lo:hi]))
        windows.append(Window(name, lo, hi, level, level / basin if basin > 0 else None))
    warm_up, ascent = Side(True, fall, levels[0], end), Side(True, rise, levels[2], start)
    return Phases(True, PHASES, warm_up, ascent, basin, tuple(windows), T)


# -- the closest curve of each shape, by pooling neighbours ---------------------------------------------------------


def errors(y: Curve, w: Curve) -> Errors:
    """How far `y` is from each shape."""
    values, weights = y.tolist(), w.tolist()
    turned, back = [-x for x in values], weights[::-1]
    falling, rising = prefix_errors(turned, weights), prefix_errors(values, weights)  # of prefixes
    falls_after, rises_after = prefix_errors(values[::-1], back)[::-1], prefix_errors(turned[::-1], back)[::-1]
    valley = min(a + b for a, b in zip(falling, rises_after, strict=True))
    hill = min(a + b for a, b in zip(rising, falls_after, strict=True))
    return Errors(falling[-1], rising[-1], valley, hill)


def prefix_errors(y: Sequence[float], w: Sequence[float]) -> list[float]:
    """Error of the closest rising curve to the first 0, 1, … n values."""
    blocks: list[Block] = []
    out, total = [0.0], 0.0
    for value, weight in zip(y, w, strict=True):
        total += _pushed(blocks, value, weight)
        out.append(total)
    return out


def rising(y: Curve, w: Curve) -> Curve:
    """The closest rising curve."""
    blocks: list[Block] = []
    for value, weight in zip(y.tolist(), w.tolist(), strict=True):
        _pushed(blocks, value, weight)
    return np.repeat([b.mean for b in blocks], [b.size for b in blocks])


def falling(y: Curve, w: Curve) -> Curve:
    """The closest falling curve."""
    return -rising(-y, w)


def valley(y: Curve, w: Curve) -> Curve:
    """The closest curve that falls and then rises."""
    before = prefix_errors((-y).tolist(), w.tolist())
    after = prefix_errors((-y[::-1]).tolist(), w[::-1].tolist())[::-1]
    turn = int(np.argmin(np.add(before, after)))
    return np.concatenate([falling(y[:turn], w[:turn]), rising(y[turn:], w[turn:])])


def hill(y: Curve, w: Curve) -> Curve:
    """The closest curve that rises and then falls."""
    return -valley(-y, w)


def corners(y: Curve, w: Curve) -> tuple[int, int]:
    """`(end, start)` of the closest straight fall before `end`, level, and straight rise from `start` on; (0, n) without them."""
    n = len(y)
    pairs = [(a, b) for a in range(1, n) for b in range(a + 1, n)]
    falls, rises = [_down(n, a) for a, _ in pairs], [_down(n, n - b)[::-1] for _, b in pairs]
    X = np.stack([np.ones((len(pairs), n)), np.array(falls), np.array(rises)], 2)  # (pairs, n, 3)
    XtW = X.transpose(0, 2, 1) * w
    heights = np.linalg.solve(XtW @ X, (XtW @ y)[..., None])[..., 0]  # (pairs, 3): the level, and both ends above it
    error = (w * (y - (X @ heights[..., None])[..., 0]) ** 2).sum(1)
    error[~(heights[:, 1:] > 0).all(1)] = np.inf
    best = int(error.argmin())
    return pairs[best] if np.isfinite(error[best]) else (0, n)


def _down(n: int, end: int) -> Curve:
    """1 at the first place, in a straight line to 0 at `end`, then 0."""
    return np.maximum(0.0, 1 - np.arange(n) / max(end, 1))


def _pushed(blocks: list[Block], value: float, weight: float) -> float:
    """Add a value at the end of a rising curve's blocks; by how much its error grows."""
    size, total, mean, error, gone = 1, weight, value, 0.0, 0.0
    while blocks and blocks[-1].mean >= mean:
        n, w, m, e = blocks.pop()
        error += e + w * total / (w + total) * (m - mean) ** 2
        mean = (w * m + total * mean) / (w + total)
        size, total, gone = size + n, total + w, gone + e
    blocks.append(Block(size, total, mean, error))
    return error - gone
