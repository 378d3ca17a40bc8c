"""Figures of the pages: shapes handed to `results.figures`, which draws."""

from collections.abc import Mapping, Sequence

from ..results import figures as drawn
from ..results.figures import Figure, loss
from . import schemas as shapes
from .words import labelled

__all__ = ["compared", "erasers", "evolution", "followed", "harmful", "loss", "matrix", "occurrences", "pace", "places"]
__all__ += ["sources", "timeline"]


def timeline(it: shapes.Timeline) -> Figure:
    """Influence by learning rate, with the phases shaded."""
    return drawn.timeline(it.per_rate, it.size, bands(it.phases), it.phases.steps)


def bands(phases: shapes.Phases) -> list[tuple[str, int, int]]:
    """`(name, first step, step after the last)` of each phase; none where the phases are not present."""
    first, last = phases.warm_up.boundary, phases.ascent.boundary
    if not phases.present or first is None or last is None:
        return []
    whole = [("warm-up", 0, first), ("basin", first, last), ("ascent", last, phases.steps)]
    return [band for band in whole if band[2] > band[1]]


def pace(it: shapes.Pace) -> Figure | None:
    """The query's own timeline."""
    return drawn.by_step(it.steps, it.influence, it.size)


def compared(left: shapes.Pace, right: shapes.Pace) -> Figure | None:
    """The timelines of two queries."""
    return drawn.compared((left.steps, left.influence), (right.steps, right.influence))


def places(now: Sequence[shapes.Hit], replay: Sequence[shapes.Ranking], side: str, colour: str) -> Figure | None:
    """Places in the rankings at all checkpoints."""
    return drawn.places([h.sample.id for h in now], [r.at for r in replay], [getattr(r, side) for r in replay], colour)


def evolution(values: Sequence[shapes.AtCheckpoint]) -> Figure | None:
    """A sample's influence on the model at every checkpoint."""
    return drawn.evolution([x.at for x in values], {"influence": [x.influence for x in values]})


def followed(samples: Mapping[str, Sequence[shapes.AtCheckpoint]]) -> Figure | None:
    """The influence of several samples on the model at every checkpoint."""
    at = [x.at for x in next(iter(samples.values()), ())]
    return drawn.evolution(at, {name: [x.influence for x in values] for name, values in samples.items()}, signs=True)


def occurrences(uses: Sequence[shapes.Occurrence]) -> Figure | None:
    """A sample's single uses."""
    return drawn.occurrences([x.step for x in uses], [x.influence for x in uses])


def erasers(samples: Sequence[shapes.Eraser]) -> Figure | None:
    """The later samples that took most."""
    made = drawn.overwriters([x.sample.id for x in samples], [x.erased for x in samples])
    return _linked(made, [x.sample.path for x in samples])


def sources(it: shapes.Sources) -> Figure | None:
    """The value of each source, with its interval."""
    rows, words = [(s.value, s.low, s.high) for s in it.sources], [s.words for s in it.sources]
    made = drawn.sources([labelled(s.name, it.by) for s in it.sources], rows, words)
    return _linked(made, [s.path for s in it.sources])


def matrix(it: shapes.Sources) -> Figure | None:
    """Sources down, domains across."""
    return drawn.matrix([labelled(s.name, it.by) for s in it.sources], it.domains, it.matrix, it.clear)


def harmful(hits: Sequence[shapes.Hit]) -> Figure | None:
    """Influences of a ranking, first to last; a click leads to the sample."""
    made = drawn.ranking([h.sample.id for h in hits], [h.influence for h in hits])
    return _linked(made, [h.sample.path for h in hits])


def _linked(made: Figure | None, paths: Sequence[str]) -> Figure | None:
    """Each bar with where a click leads."""
    if made is not None:
        made["layout"]["meta"]["links"] = list(paths)[: len(made["layout"]["meta"]["items"])]
    return made
