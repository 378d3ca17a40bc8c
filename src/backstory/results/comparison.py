"""Rankings compared: those of one query at several checkpoints, and those of two queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import figures
from .influence import Influence
from .result import Result
from .row import Row

SIDES = {"hits": figures.HELPED, "harmful": figures.HURT}


@dataclass(frozen=True)
class Ranking(Row):
    """The ids at both ends of a query's ranking at one checkpoint, most first."""

    at: int
    hits: tuple[str, ...]
    harmful: tuple[str, ...]


def rank(influence: Influence, top: int = 10) -> Ranking:
    """Both ends of the ranking of one query, or of the mean of several."""
    return Ranking(influence.at, *(tuple(str(hit.sample) for hit in side) for side in influence.hits(top)))


@dataclass(frozen=True, repr=False)
class Rankings(Result):
    """The rankings of one query at several checkpoints, of which `at` is one."""

    rankings: tuple[Ranking, ...]
    shown = ("rankings",)

    def table(self) -> Mapping[str, Any]:
        """One line for each checkpoint, side and place."""
        rows = [(r.at, name, k, x) for r in self.rankings for name in SIDES for k, x in enumerate(getattr(r, name), 1)]
        return dict(zip(("checkpoint", "side", "place", "sample"), map(list, zip(*rows, strict=True)), strict=False))

    def drawings(self) -> dict[str, figures.Figure]:
        """The places of the samples that helped and of those that hurt, from checkpoint to checkpoint."""
        steps, now = [r.at for r in self.rankings], next(r for r in self.rankings if r.at == self.at)
        drawn = {
            f"places_{name}": figures.places(
                getattr(now, name), steps, [getattr(r, name) for r in self.rankings], colour
            )
            for name, colour in SIDES.items()
        }
        return figures.drawable(**drawn)


def rankings_of(influences: Sequence[Influence], at: int, *, top: int = 10) -> Rankings:
    """The rankings of a query from its influences at several checkpoints."""
    now = next(x for x in influences if x.at == at)
    return Rankings(tuple(rank(x, top) for x in influences), **now.about)


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The influences on two queries, and the samples at the same end of both rankings."""

    left: Influence
    right: Influence
    top: int  # of either end
    shown = ("both",)

    @property
    def method(self) -> tuple[str, ...]:
        """Of either influence."""
        return self.left.method, self.right.method

    @property
    def both(self) -> list[str]:
        """Ids that both name on the same side."""
        one, two = (rank(x, self.top) for x in (self.left, self.right))
        return sorted({*one.hits} & {*two.hits} | {*one.harmful} & {*two.harmful})

    def table(self) -> Mapping[str, Any]:
        """One line for each step."""
        one, two = self.left.by_step(), self.right.by_step()
        return {"step": one.steps, "first": one.influence, "second": two.influence}

    def drawings(self) -> dict[str, figures.Figure]:
        """The influence of each step on either query."""
        both = ((x.steps, x.influence) for x in (self.left.by_step(), self.right.by_step()))
        return figures.drawable(compare=figures.compared(*both))


def compare(left: Influence, right: Influence, *, top: int = 10) -> Comparison:
    """Two queries of one model."""
    caveats = tuple(dict.fromkeys((*left.caveats, *right.caveats)))
    return Comparison(left, right, top, **{**left.about, "caveats": caveats})
