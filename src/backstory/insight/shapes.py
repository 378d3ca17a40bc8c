r"""The closest falling, rising, valley- and hill-shaped curves to a noisy one, by pooling neighbours.

The closest rising curve (f₁ ≤ f₂ ≤ …) to values y in Σ w (y − f)² is found by pooling: from left to right, neighbouring blocks
whose means stand in the wrong order become one block with their common mean. The error of every prefix comes along, so that
the closest valley (falling up to some place, rising from it on) needs one pass from either side:

    error of the valley = min over c of  falling error of y[:c]  +  rising error of y[c:]

A hill is a valley turned over.

Shapes:  n values.
Knows nothing of training, influence or chance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]


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


def errors(y: Curve, w: Curve | None = None) -> Errors:
    """How far `y` is from each shape."""
    values, weights = y.tolist(), _weights(y, w)
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


def rising(y: Curve, w: Curve | None = None) -> Curve:
    """The closest rising curve."""
    blocks: list[Block] = []
    for value, weight in zip(y.tolist(), _weights(y, w), strict=True):
        _pushed(blocks, value, weight)
    return np.repeat([b.mean for b in blocks], [b.size for b in blocks])


def falling(y: Curve, w: Curve | None = None) -> Curve:
    """The closest falling curve."""
    return -rising(-y, w)


def valley(y: Curve, w: Curve | None = None) -> Curve:
    """The closest curve that falls and then rises."""
    weights = np.array(_weights(y, w))
    before = prefix_errors((-y).tolist(), weights.tolist())
    after = prefix_errors((-y[::-1]).tolist(), weights[::-1].tolist())[::-1]
    turn = int(np.argmin(np.add(before, after)))
    return np.concatenate([falling(y[:turn], weights[:turn]), rising(y[turn:], weights[turn:])])


def hill(y: Curve, w: Curve | None = None) -> Curve:
    """The closest curve that rises and then falls."""
    return -valley(-y, w)


class Ramps(NamedTuple):
    """A straight fall to a level, and a straight rise from it; at least one value lies on the level."""

    end: int  # the fall is before it
    start: int  # the rise is from it on
    level: float
    fall: float  # how far above the level the curve begins
    rise: float  # how far above it ends


def ramps(y: Curve, w: Curve | None = None, *, falls: bool, rises: bool) -> Ramps:
    """The closest curve of a level with a straight fall before it, a straight rise after it, or both."""
    n, weights = len(y), np.array(_weights(y, w))
    corners = [(a, b) for a in (range(1, n) if falls else (0,)) for b in (range(a + 1, n) if rises else (n,))]
    sides = ([[_down(n, a) for a, _ in corners]] if falls else []) + (
        [[_down(n, n - b)[::-1] for _, b in corners]] if rises else []
    )
    flat = Ramps(0, n, float(np.average(y, weights=weights)), 0.0, 0.0)
    if not sides:
        return flat
    X = np.stack([np.ones((len(corners), n)), *(np.array(side) for side in sides)], 2)  # (corners, n, 2 or 3)
    XtW = X.transpose(0, 2, 1) * weights
    found = np.linalg.solve(XtW @ X, (XtW @ y)[..., None])[..., 0]  # (corners, 2 or 3)
    error = (weights * (y - (X @ found[..., None])[..., 0]) ** 2).sum(1)
    error[~(found[:, 1:] > 0).all(1)] = np.inf
    best = int(error.argmin())
    if not np.isfinite(error[best]):
        return flat
    level, *heights = found[best].tolist()
    return Ramps(*corners[best], level, heights[0] if falls else 0.0, heights[-1] if rises else 0.0)


def _down(n: int, end: int) -> Curve:
    """1 at the first place, in a straight line to 0 at `end`, then 0."""
    return np.maximum(0.0, 1 - np.arange(n) / max(end, 1))


def _weights(y: Curve, w: Curve | None) -> list[float]:
    return [1.0] * len(y) if w is None else w.tolist()


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
