r"""The closest falling, rising, valley- and hill-shaped curves to a noisy one, by pooling neighbours.

The closest rising curve (f₁ ≤ f₂ ≤ …) to values y in Σ w (y − f)² is found by pooling: from left to right, neighbouring blocks
whose means stand in the wrong order become one block with their common mean. The error of every prefix comes along, so that
the closest valley (falling up to some place, rising from it on) needs one pass from either side:

    error of the valley = min over c of  falling error of y[:c]  +  rising error of y[c:]

A hill is a valley turned over.

Shapes:  n values.
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


def corners(y: Curve, w: Curve | None = None) -> tuple[int, int]:
    """`(end, start)` of the closest straight fall before `end`, level, and straight rise from `start` on; (0, n) without them."""
    n, weights = len(y), np.array(_weights(y, w))
    pairs = [(a, b) for a in range(1, n) for b in range(a + 1, n)]
    falls, rises = [_down(n, a) for a, _ in pairs], [_down(n, n - b)[::-1] for _, b in pairs]
    X = np.stack([np.ones((len(pairs), n)), np.array(falls), np.array(rises)], 2)  # (pairs, n, 3)
    XtW = X.transpose(0, 2, 1) * weights
    heights = np.linalg.solve(XtW @ X, (XtW @ y)[..., None])[..., 0]  # (pairs, 3): the level, and both ends above it
    error = (weights * (y - (X @ heights[..., None])[..., 0]) ** 2).sum(1)
    error[~(heights[:, 1:] > 0).all(1)] = np.inf
    best = int(error.argmin())
    return pairs[best] if np.isfinite(error[best]) else (0, n)


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
