"""The most harmful and the most helpful samples, with their stored content."""

from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from torch import nn

from ..errors import UsageError
from ..results import figures
from ..results.influence import ENDS, Influence, RankedSample, ranking
from ..results.result import Result
from ..results.words import late_from
from ..run.gradients import LossFn
from ..run.run import Run
from .mean import Options, mean_influence


@dataclass(frozen=True, repr=False)
class Harmful(Result):
    """The most harmful and most helpful samples."""

    harmful: tuple[RankedSample, ...]  # those that hurt, lowest influence first
    helpful: tuple[RankedSample, ...]  # those that helped, highest first
    without_last: int = 0  # uses in so many of the last steps are left out
    method: str = field(default="", kw_only=True)  # of the influence
    unit = "influence of a sample (its occurrences summed), in units of the queries' mean loss"
    shown = ("harmful", "helpful", "without_last", "late", "late_from", "method")

    @property
    def headline(self) -> str:
        """What the ranking is of."""
        return f"Most harmful and most helpful samples for the model at step {self.at}"

    @property
    def late_from(self) -> int:
        """The first step of the last tenth of training."""
        return late_from(self.at)

    @property
    def late(self) -> int:
        """How many of the samples that hurt were last used in the last tenth of training."""
        return sum(sample.last >= self.late_from for sample in self.harmful)

    @property
    def words(self) -> tuple[str, ...]:
        """How many of the most harmful samples were used at the end, and why."""
        n = len(self.harmful)
        if not n:
            return ()
        if self.without_last and self.at - self.without_last <= self.late_from:
            return (
                f"Uses in the last tenth of training (from step {self.late_from:,}), which weigh most, are left out.",
            )
        share = f"{self.late} of these {n} samples were" if n > 1 else f"This sample was{'' if self.late else ' not'}"
        return (
            f"{share} last used in the last tenth of training (from step {self.late_from:,}). Late uses weigh most, "
            "because little has overwritten them yet: a sample may rank here because it came last, not because it "
            "is bad.",
        )

    def table(self) -> dict[str, Any]:
        """One line for each sample."""
        return RankedSample.table((*self.harmful, *self.helpful))

    def preview(self) -> dict[str, Any]:
        """The same in the columns that every ranking has."""
        return ranking([*self.harmful, *self.helpful])

    def lines(self) -> tuple[str, ...]:
        """A few samples of each end."""
        return *map(str, self.harmful[:ENDS]), *map(str, self.helpful[:ENDS])

    def drawings(self) -> dict[str, figures.Figure]:
        """Bars of influence, of those that hurt and of those that helped."""
        sides = {"harmful": self.harmful, "helpful": self.helpful}
        ranked = {k: ([str(x.sample) for x in side], [x.influence for x in side]) for k, side in sides.items()}
        return figures.drawable(**{name: figures.ranking(*side) for name, side in ranked.items()})


def harmful(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    at: int | str = "final",
    *,
    top: int = 10,
    without_last: int = 0,
    **options: Unpack[Options],
) -> Harmful:
    """The samples that hurt the queries' mean loss most and those that helped most; at most `top` of each.

    Uses in the last `without_last` steps are left out: they weigh most, because nothing came after them.
    """
    return harmful_of(run, mean_influence(run, model, loss, batch, at, **options), top=top, without_last=without_last)


def harmful_of(run: Run, influence: Influence, *, top: int = 10, without_last: int = 0) -> Harmful:
    """Like `harmful`, from the influence on one query."""
    at = influence.at
    if not 0 <= without_last < at:
        raise UsageError(
            f"without_last must be between 0 and {at - 1}, since the model has taken {at} steps, got {without_last}."
        )
    known = influence if influence.lookup is not None else replace(influence, lookup=run.content)
    part = known.between(0, at - without_last) if without_last else known
    best, worst = part.hits(top)
    return Harmful(tuple(worst), tuple(best), without_last, method=part.method, **part.about)
