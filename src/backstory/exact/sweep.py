r"""A run from its last step to its first: about √T kept states, and one segment between two of them at a time.

Shapes:  T steps, √T segments, each replayed once more, so that memory holds 2√T states.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..errors import UsageError
from ..replay import update
from ..replay.tape import Tape
from ..replay.update import Slots


class Moment(NamedTuple):
    """One step with the state before and after it."""

    step: int
    before: Slots
    after: Slots


def boundaries(steps: int, count: int | None) -> list[int]:
    """First steps of `count` equal segments (about √T by default)."""
    chosen = count if count is not None else math.isqrt(max(steps - 1, 0)) + 1
    if chosen < 1:
        raise UsageError(f"found checkpoints={count}; expected at least 1.")
    chosen = min(chosen, steps)
    return [i * steps // chosen for i in range(chosen)]


def segments(bounds: Sequence[int], end: int) -> list[tuple[int, int]]:
    """`(first step, one past the last)` of each segment, last segment first."""
    return list(zip(bounds, [*bounds[1:], end], strict=True))[::-1]


def backward(tape: Tape, first: int, end: int) -> Iterator[Moment]:
    """The steps of one segment, last first; the state before `first` must be kept."""
    start = tape.rewind(first)
    states = [update.slots(tape.optimizer)]
    for t in range(start, end):
        tape.step(t)
        states.append(update.slots(tape.optimizer))
    for t in range(end - 1, start - 1, -1):
        yield Moment(t, states[t - start], states[t - start + 1])
