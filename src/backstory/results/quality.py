"""Measured quality: how well a run's recorded influences rank the uses of its training data, by exact results on the run itself.

    rank          Spearman's correlation of recorded and exact influences, over the uses in a part of the run
    factor        Σ |exact| / Σ |recorded| of a twentieth: recorded sizes over time are shown multiplied by it
    first order   the same correlation of exact influences and training again without single uses

`run.calibrate` measures all three, on the mean of a query set and on single queries; a number speaks of one of these kinds. What a
reader is told takes the worse of both correlations: a score cannot predict retraining better than first order can.

Shapes:  tenths and twentieths are equal parts of the steps before the model that was queried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .row import Row
from .words import describe_duration

THIRDS, TENTHS, SIZES = 3, 10, 20  # parts of the run
RANKS = 0.5  # below this a part is not ranked
LEVELS = ((0.8, "well"), (RANKS, "partly"), (0.2, "poorly"), (-math.inf, "not at all"))
NAMES = ("first", "middle", "last")
Steps = NDArray[np.int64]
Floats = NDArray[np.float64]


def name_rank(rank: float) -> str:
    """A rank correlation in a word or two."""
    return next(word for least, word in LEVELS if rank >= least)


def part_of(steps: Any, at: int, parts: int) -> Steps:
    """Which of so many equal parts of the steps before `at` each step lies in."""
    return np.minimum(parts - 1, parts * np.asarray(steps, np.int64) // max(1, at))


def two_digits(rank: float) -> str:
    """A rank correlation; 0 has no sign."""
    return f"{rank:.2f}".replace("-0.00", "0.00")


@dataclass(frozen=True)
class Agreement(Row):
    """How recorded influences rank the uses of some steps, beside exact ones."""

    first: int
    last: int  # steps first … last−1
    rank: float | None  # mean over the queries it was measured on; None where too few uses lie in these steps
    low: float | None  # 95 % interval, by the number of uses and the spread between queries
    high: float | None
    uses: int


@dataclass(frozen=True)
class FirstOrder(Row):
    """How exact first-order influences rank what training again without single uses does."""

    rank: float
    low: float
    high: float
    trainings: int  # uses that were left out, one at a time
    clear: int  # of these, how many changed the loss by more than rounding does

    @property
    def words(self) -> str:
        """What was measured."""
        few = "" if self.told else f", only {self.clear} of which changed the loss by more than rounding does"
        rank = f"rank correlation {two_digits(self.rank)} over {self.trainings} uses{few}"
        return f"exact values predict leave-one-out retraining {name_rank(self.rank)} ({rank})"

    @property
    def told(self) -> bool:
        """Whether retraining tells most of the uses apart: half or more changed the loss by more than rounding does."""
        return 2 * self.clear >= self.trainings


@dataclass(frozen=True)
class Quality(Row):
    """How well a result's values rank uses of the training data, as far as that was measured on its run."""

    exact: bool = False  # whether the values are exact
    on: str = ""  # what it was measured on; empty where it was not
    whole: Agreement | None = None  # of recorded values with exact ones; exact values have none
    thirds: tuple[Agreement, ...] = ()
    tenths: tuple[Agreement, ...] = ()
    factors: tuple[float, ...] = ()  # of each twentieth; empty where sizes are not corrected
    first_order: FirstOrder | None = None
    stale: str = ""  # why what was measured does not hold for these values
    command: str = ""  # what measures it
    seconds: float | None = None  # that it would take

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return (self.first_order if self.exact else self.whole) is not None

    @property
    def rank(self) -> float | None:
        """The worse of both correlations, over all uses that the result speaks of."""
        return self._worse(None if self.whole is None else self.whole.rank)

    @property
    def weak(self) -> tuple[tuple[int, int], ...]:
        """`(first, last)` of the stretches of steps that are not ranked."""
        bad = [(x.first, x.last) for x in self.tenths if not self._ranks(x)]
        joined: list[tuple[int, int]] = []
        for first, last in bad:
            joined[-1:] = (
                [(joined[-1][0], last)] if joined and joined[-1][1] == first else [*joined[-1:], (first, last)]
            )
        return tuple(joined)

    @property
    def sentence(self) -> str:
        """The quality in one sentence."""
        if not self.measured:
            return self._missing()
        if self.exact:
            words = "" if self.first_order is None else self.first_order.words
            return f"Exact to first order: {words}."
        if self.rank is None:
            return f"Too few uses to measure a rank correlation (measured on {self.on})."
        rank = f"{name_rank(self.rank)} (rank correlation {two_digits(self.rank)})"
        return f"{self._uses()} {rank}{self._parts()}; measured on {self.on}{self._limit()}."

    def between(self, first: int, last: int) -> "Quality":
        """Of the values of steps first … last−1 alone: the mean over the tenths that they lie in."""
        inside = tuple(x for x in self.tenths if x.last > first and x.first < last)
        if self.whole is None or (first <= self.whole.first and last >= self.whole.last):
            return self
        return replace(self, whole=_mean(inside, first, last), thirds=(), tenths=inside)

    def ranked(self, steps: Any) -> NDArray[np.bool_]:
        """Whether each of these steps lies in a part that is ranked; none does where nothing was measured."""
        out = np.zeros(len(steps := np.asarray(steps)), bool)
        for x in self.tenths:
            out |= (steps >= x.first) & (steps < x.last) & self._ranks(x)
        return out

    def correction(self, steps: Any, at: int) -> Floats:
        """What the size of a recorded influence of each of these steps is multiplied by, where it is shown over time."""
        if self.exact or not self.factors:
            return np.ones(len(steps))
        return np.asarray(self.factors)[part_of(steps, at, len(self.factors))]

    def _uses(self) -> str:
        whole = self.whole
        if whole is None or self.thirds:
            return "Overall, ranks uses"
        return f"Ranks the uses of steps {whole.first} to {whole.last - 1}"

    def _ranks(self, part: Agreement) -> bool:
        """Whether a tenth is ranked; one with too few uses is taken to be like the whole."""
        rank = self._worse(part.rank) if part.rank is not None else self.rank
        return rank is not None and rank >= RANKS

    def _worse(self, rank: float | None) -> float | None:
        """Of a part's correlation and that of first order."""
        limit = None if self.first_order is None else self.first_order.rank
        known = [x for x in (rank, limit) if x is not None]
        return None if rank is None and not self.exact else min(known, default=None)

    def _limit(self) -> str:
        """That first order is what limits the rank, or rounding in what it was compared with, where it does."""
        rank = None if self.whole is None else self.whole.rank
        if self.first_order is None or rank is None or self.first_order.rank >= rank:
            return ""
        limit = "first order" if self.first_order.told else "rounding"
        return f"; {limit} is the limit: {self.first_order.words}"

    def _parts(self) -> str:
        """The thirds, best first, where they differ."""
        worse = [(self._worse(part.rank), name) for part, name in zip(self.thirds, NAMES, strict=False)]
        ranked = sorted(((x, name) for x, name in worse if x is not None), key=lambda pair: -pair[0])
        if len({x for x, _ in ranked}) < 2:
            return ""
        return ": " + ", ".join(f"{name_rank(x)} in the {name} third ({two_digits(x)})" for x, name in ranked)

    def _missing(self) -> str:
        seconds = "" if self.seconds is None else f" (about {describe_duration(self.seconds)})"
        what = "how well exact values predict retraining" if self.exact else "how reliable the ranking is"
        how = f" To measure {what}: `{self.command}`{seconds}." if self.command else ""
        reason = f" for these values: {self.stale}" if self.stale else ""
        return f"Quality: not measured{reason}.{how}"


def bounds(at: int, parts: int) -> list[tuple[int, int]]:
    """`(first, last)` of the steps of each part, as `part_of` has them."""
    edges = [-(-at * k // parts) for k in range(parts + 1)]
    return list(pairwise(edges))


def _mean(parts: Sequence[Agreement], first: int, last: int) -> Agreement:
    """Some tenths as one, weighted by their uses."""
    known = [x for x in parts if x.rank is not None and x.low is not None and x.high is not None]
    uses = sum(x.uses for x in known)
    if not uses:
        return Agreement(first, last, None, None, None, 0)
    rank, low, high = (sum(getattr(x, name) * x.uses for x in known) / uses for name in ("rank", "low", "high"))
    return Agreement(first, last, rank, low, high, uses)
