"""Segments, and the states that a backward sweep meets."""

import pytest
from tests.support import examples
from tests.support.oracles import assert_same

from backstory.errors import UsageError
from backstory.exact.sweep import backward, boundaries, segments
from backstory.replay import update
from backstory.replay.tape import Tape


def test_segments_cover_the_run_once() -> None:
    for steps in range(1, 40):
        for count in (None, 1, 3, 100):
            bounds = boundaries(steps, count)
            covered = [t for a, b in segments(bounds, steps) for t in range(b - 1, a - 1, -1)]
            assert covered == list(range(steps))[::-1]
            assert bounds[0] == 0
    assert len(boundaries(100, None)) == 10


def test_no_segments_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        boundaries(5, 0)


def test_states_are_those_of_the_run() -> None:
    tape = Tape(lambda: examples.make("adam", dropout=0.3))
    seen = []
    tape.record([0, 4], watch=lambda t: seen.append(update.slots(tape.optimizer)))
    for first, end in ((4, 8), (0, 4)):
        for moment in backward(tape, first, end):
            for found, expected in ((moment.before, seen[moment.step]), (moment.after, seen[moment.step + 1])):
                for x, y in zip(found, expected, strict=True):
                    for a, b in zip(x, y, strict=True):
                        assert_same(a, b, examples.TERMS, size=1.0)
