r"""The closest falling, rising and valley-shaped curves to a noisy one, by pooling neighbours.

The closest rising curve (f₁ ≤ f₂ ≤ …) to values y in Σ (y − f)² is found by pooling: from left to right, neighbouring blocks
whose means stand in the wrong order become one block with their common mean. The error of every prefix comes along, so that
the closest valley (falling up to some place, rising from it on) needs one pass from either side:

    error of the valley = min over c of  falling error of y[:c]  +  rising error of y[c:]

Shapes:  n values.
Knows nothing of training, influence or chance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]
Block = tuple[int, float, float]  # how many values, their mean, their squared distance from it


class Errors(NamedTuple):
    """Squared errors of the closest curve of each shape, and where the valley turns."""

    falling: float
    rising: float
    valley: float
    turn: int  # values before it fall, values from it on rise


def errors(y: Curve) -> Errors:
    """How far `y` is from each shape."""
    falling = prefix_errors((-y).tolist())
    rising = prefix_errors((-y[::-1]).tolist())[::-1]  # of suffixes
    both = [a + b for a, b in zip(falling, rising, strict=True)]
    turn = min(range(len(both)), key=both.__getitem__)
    return Errors(falling[-1], rising[0], both[turn], turn)


def prefix_errors(y: Sequence[float]) -> list[float]:
    """Error of the closest rising curve to the first 0, 1, … n values."""
    blocks: list[Block] = []
    out, total = [0.0], 0.0
    for value in y:
        total += _pushed(blocks, value)
        out.append(total)
    return out


def rising(y: Curve) -> Curve:
    """The closest rising curve."""
    blocks: list[Block] = []
    for value in y.tolist():
        _pushed(blocks, value)
    return np.repeat([mean for _, mean, _ in blocks], [size for size, _, _ in blocks])


def falling(y: Curve) -> Curve:
    """The closest falling curve."""
    return -rising(-y)


def valley(y: Curve) -> Curve:
    """The closest curve that falls and then rises."""
    turn = errors(y).turn
    return np.concatenate([falling(y[:turn]), rising(y[turn:])])


class Ramps(NamedTuple):
    """A straight fall to a level, and a straight rise from it."""

    end: int  # the fall is before it
    start: int  # the rise is from it on
    level: float
    fall: float  # how far above the level the curve begins
    rise: float  # how far above it ends


def ramps(y: Curve, *, falls: bool, rises: bool) -> Ramps:
    """The closest curve of a level with a straight fall before it, a straight rise after it, or both."""
    n = len(y)
    best, least = Ramps(0, n, float(y.mean()), 0.0, 0.0), float(((y - y.mean()) ** 2).sum())
    for end in range(1, n) if falls else (0,):
        for start in range(end, n - 1) if rises else (n,):
            X = np.stack(
                [np.ones(n), *([_down(n, end)] if falls else []), *([_down(n, n - start)[::-1]] if rises else [])], 1
            )
            found = np.linalg.lstsq(X, y, rcond=None)[0]
            error = float(((y - X @ found) ** 2).sum())
            if error < least and (found[1:] > 0).all():
                sizes = found[1:].tolist()
                best = Ramps(end, start, float(found[0]), sizes[0] if falls else 0.0, sizes[-1] if rises else 0.0)
                least = error
    return best


def _down(n: int, end: int) -> Curve:
    """1 at the first place, in a straight line to 0 at `end`, then 0."""
    return np.maximum(0.0, 1 - np.arange(n) / max(end, 1))


def _pushed(blocks: list[Block], value: float) -> float:
    """Add a value at the end of a rising curve's blocks; by how much its error grows."""
    size, mean, error, gone = 1, value, 0.0, 0.0
    while blocks and blocks[-1][1] >= mean:
        n, m, e = blocks.pop()
        error += e + n * size / (n + size) * (m - mean) ** 2
        mean = (n * m + size * mean) / (n + size)
        size, gone = size + n, gone + e
    blocks.append((size, mean, error))
    return error - gone
