"""Measured quality: how well a run's recorded influences rank the uses of its training data, by exact results on the run itself.

    rank          Spearman's correlation of recorded and exact influences, over the uses in a part of the run
    factor        Σ |exact| / Σ |recorded| of a twentieth: recorded sizes over time are shown multiplied by it
    first order   the same correlation of exact influences and training again without single uses

`run.calibrate` measures all three, on the mean of a query set and on single queries; a number speaks of one of these kinds. What a
reader is told takes the worse of both correlations: a score cannot predict retraining better than first order can. First order is
measured on the uses of each third too, and a part of the run takes the worse of its own two.

Shapes:  tenths and twentieths are equal parts of the steps before the model that was queried.
"""

import math
import operator
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
    """How recorded influences rank the uses of some steps, beside exact ones; or exact ones, beside training again."""

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
    clear: (
        int | None
    )  # of these, how many changed the loss by more than rounding does; None where only the whole run knows

    @property
    def words(self) -> str:
        """What was measured."""
        few = f", only {self.clear} of which changed the loss by more than rounding does" if self.drowned else ""
        rank = f"rank correlation {two_digits(self.rank)} over {self.trainings} uses{few}"
        return f"exact values predict leave-one-out retraining {name_rank(self.rank)} ({rank})"

    @property
    def drowned(self) -> bool:
        """Whether rounding hides most of the uses: fewer than half changed the loss by more than it does."""
        return self.clear is not None and 2 * self.clear < self.trainings

    @property
    def suspect(self) -> str:
        """What makes the rank low, where it is."""
        return "rounding" if self.drowned else "first order" if self.clear is not None else "first order or rounding"


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
    retrained: tuple[
        Agreement, ...
    ] = ()  # of exact values with training again, by thirds; without a rank where too few were left out
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
        limit = None if self.first_order is None else self.first_order.rank
        return limit if self.exact else _worse(None if self.whole is None else self.whole.rank, limit)

    @property
    def by_third(self) -> tuple[float | None, ...]:
        """The worse of both correlations in each third; of exact values the one that they have."""
        return tuple(map(self._worse_in, self.retrained if self.exact else self.thirds))

    @property
    def by_tenth(self) -> tuple[float | None, ...]:
        """The same in each tenth."""
        return tuple(map(self._worse_in, self.tenths))

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
            return f"Exact to first order: {words}{self._parts() if self._differ() else ''}."
        if self.rank is None:
            return f"Too few uses to measure a rank correlation (measured on {self.on})."
        rank = f"{name_rank(self.rank)} (rank correlation {two_digits(self.rank)})"
        return f"{self._uses()} {rank}{self._parts()}; measured on {self.on}{self._limit()}."

    def between(self, first: int, last: int) -> "Quality":
        """Of the values of steps first … last−1 alone: the mean over the tenths that they lie in, and first order by its thirds."""
        parts = self.retrained if self.exact else self.tenths
        if not parts or (first <= parts[0].first and last >= parts[-1].last):
            return self
        order, tenths = self._first_order_of(first, last), _inside(self.tenths, first, last)
        if self.exact:
            return replace(self, first_order=order, retrained=_inside(self.retrained, first, last))
        return replace(self, whole=_mean(tenths, first, last), thirds=(), tenths=tenths, first_order=order)

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

    def _differ(self) -> bool:
        """Whether all thirds are there, and have different words."""
        return len(self.by_third) == THIRDS and len({name_rank(x) for x in self.by_third if x is not None}) > 1

    def _uses(self) -> str:
        whole = self.whole
        if whole is None or self.thirds:
            return "Overall, ranks uses"
        return f"Ranks the uses of steps {whole.first} to {whole.last - 1}"

    def _ranks(self, part: Agreement) -> bool:
        """Whether a tenth is ranked; one with too few uses is taken to be like the whole."""
        rank = self._worse_in(part) if part.rank is not None else self.rank
        return rank is not None and rank >= RANKS

    def _worse_in(self, part: Agreement) -> float | None:
        """Of a part's own two correlations."""
        order = self._first_order_of(part.first, part.last)
        limit = None if order is None else order.rank
        return limit if self.exact else _worse(part.rank, limit)

    def _first_order_of(self, first: int, last: int) -> FirstOrder | None:
        """Of steps first … last−1, as the thirds have it that they lie in, by how many; of the whole run where too few uses were left out there."""
        inside = [x for x in _inside(self.retrained, first, last) if x.rank is not None]
        if not inside:
            return self.first_order
        rank, low, high = _weighted(inside, [min(last, x.last) - max(first, x.first) for x in inside])
        return FirstOrder(rank, low, high, sum(x.uses for x in inside), None)

    def _limit(self) -> str:
        """That first order is what limits the rank, or rounding in what it was compared with, where it does."""
        rank = None if self.whole is None else self.whole.rank
        if self.first_order is None or rank is None or self.first_order.rank >= rank:
            return ""
        return f"; {self.first_order.suspect} is the limit: {self.first_order.words}"

    def _parts(self) -> str:
        """The thirds, best first, where they differ."""
        worse = zip(self.by_third, NAMES, strict=False)
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


def _worse(rank: float | None, limit: float | None) -> float | None:
    """Of a correlation and that of first order; none where the first is not known."""
    return rank if rank is None or limit is None else min(rank, limit)


def _inside(parts: Sequence[Agreement], first: int, last: int) -> tuple[Agreement, ...]:
    """Those that steps first … last−1 lie in."""
    return tuple(x for x in parts if x.last > first and x.first < last)


def _mean(parts: Sequence[Agreement], first: int, last: int) -> Agreement:
    """Some tenths as one, weighted by their uses."""
    known = [x for x in parts if x.rank is not None]
    uses = [x.uses for x in known]
    rank, low, high = _weighted(known, uses) if sum(uses) else (None, None, None)
    return Agreement(first, last, rank, low, high, sum(uses))


def _weighted(parts: Sequence[Agreement], weights: Sequence[int]) -> tuple[float, float, float]:
    """The mean rank of parts that have one, and that of the ends of its interval."""
    values = [[getattr(x, name) for x in parts] for name in ("rank", "low", "high")]
    rank, low, high = (math.fsum(map(operator.mul, x, weights)) / sum(weights) for x in values)
    return rank, low, high
