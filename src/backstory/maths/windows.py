r"""Windows: the steps of a run that share one curvature, and which of them give rows for it.

Windows are `first` steps long. Where the run's length is not known they grow: after twelve windows of one length the next are twice as long,

    12 windows of n steps, 12 of 2 n, 12 of 4 n, …      step t lies in the group k = ⌊log₂(t / 12n + 1)⌋, which begins at 12n (2ᵏ − 1)

so that a run of T steps has about 12 log₂(T / 12n) of them. Of each window, `seen` steps give rows, evenly spread:

    step lo + i of a window of n steps is seen where  (i · seen) mod n < seen
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

ALIKE = 12  # windows of one length
Span = tuple[int, int]  # from step, to step


class Grid(NamedTuple):
    """Where windows begin and end, and what is kept of each."""

    first: int  # steps of the first windows
    growing: bool  # whether later ones are longer
    seen: int  # steps of each that give rows
    rank: int  # directions that are kept

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """From a run's config."""
        return cls(*(stored[name] for name in cls._fields))

    def window(self, step: int) -> Span:
        """The window that a step lies in."""
        n, begin = self.first, 0
        if self.growing:
            k = (step // (ALIKE * n) + 1).bit_length() - 1
            n, begin = n << k, ALIKE * n * ((1 << k) - 1)
        lo = begin + (step - begin) // n * n
        return lo, lo + n

    def is_seen(self, step: int) -> bool:
        """Whether a step gives rows for the curvature of its window."""
        lo, hi = self.window(step)
        return (step - lo) * self.seen % (hi - lo) < self.seen

    def rows(self, lo: int, hi: int, each: float, p: int) -> float:
        """The most rows of p numbers that the windows of these steps keep, where a seen step gives `each`."""
        return sum(min(self.rank, p, each * min(self.seen, b - a)) for a, b in self.windows(lo, hi))

    def windows(self, lo: int, hi: int) -> list[Span]:
        """The windows of the steps from `lo` to `hi`; those at the ends are cut there."""
        out = []
        while lo < hi:
            end = min(self.window(lo)[1], hi)
            out.append((lo, end))
            lo = end
        return out
