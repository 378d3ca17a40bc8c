"""The report of a run: one HTML file with style, script, figures and pictures in it.

It states that it contains training data. Nothing in it leads elsewhere.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from .. import __version__
from ..insight.harmful import UNIT
from ..results.figures import HELPED, HURT, Figure
from . import figures, views, views_samples
from . import schemas as shapes
from . import views_query as views_ask
from .pages import TIMELINE, environment, static
from .ranking import both
from .state import Opened, size
from .words import lateness

BEST = 6  # samples on either side
FOLLOWED = 3  # of them, whose influence is followed over training
WORST = 20  # in the table of what hurt
ON_PAGE = "<noscript>Figures need JavaScript; the numbers are in this page's JSON.</noscript>"
IN_FILE = "<noscript>Figures need JavaScript; the numbers are in the source of this file, after this place.</noscript>"


class Report(shapes.Shape):
    """What a report shows."""

    overview: shapes.Overview
    timeline: shapes.Timeline
    sources: shapes.Sources | None
    helpful: list[shapes.Hit]
    hurt: shapes.Harmful
    followed: dict[str, list[shapes.AtCheckpoint]]  # of samples that helped or hurt most
    life: shapes.Life | None  # of the sample that helped most
    answers: list[
        shapes.Answer
    ]  # one question, asked of the model at every checkpoint; the last one is of the final model
    compared: shapes.Comparison | None  # with the next query of the set
    unit: str = UNIT

    @property
    def answer(self) -> shapes.Answer:
        """That of the final model, with the rankings at all checkpoints."""
        return self.answers[-1]

    @property
    def harmful(self) -> list[shapes.Hit]:
        """As many as are shown beside those that helped."""
        return self.hurt.items[:BEST]


def gathered(opened: Opened, queries: str | None = None) -> Report:
    """Everything that a report shows, for one query set; sources for all domains, as on the page."""
    name, has = opened.named(queries), opened.catalogue.has
    best, _ = both(opened.mean(name, opened.final).scores[0], opened.catalogue, BEST, None)
    helpful = [h for h in best if h.influence > 0]
    hurt = views.harmful(opened, name, WORST, None)
    return Report(
        overview=views.overview(opened),
        timeline=views.timeline(opened, name, None),
        sources=views.sources(opened, None, None, None)[1] if has.source or has.label else None,
        helpful=_alone(opened, helpful),
        hurt=hurt.model_copy(update={"items": _alone(opened, hurt.items)}),
        followed=_followed(opened, [*helpful[:FOLLOWED], *hurt.items[:FOLLOWED]], name),
        life=_life(opened, helpful[:1], name),
        answers=_worked(opened, name),
        compared=_compared(opened, name),
    )


def _followed(opened: Opened, hits: Sequence[shapes.Hit], name: str) -> dict[str, list[shapes.AtCheckpoint]]:
    return {h.sample.id: views_samples.evolution(opened, opened.catalogue.number(h.sample.id), name) for h in hits}


def _life(opened: Opened, hits: Sequence[shapes.Hit], name: str) -> shapes.Life | None:
    """Of the first of these samples, with what saturated it."""
    for hit in hits:
        found = views_samples.life(opened, hit.sample.id, name, True)
        return found.model_copy(update={"sample": _held(opened, found.sample)})
    return None


def _worked(opened: Opened, name: str) -> list[shapes.Answer]:
    """The first query of the set at every checkpoint that can be asked."""
    question, steps = views_ask.stored(opened, name, 0), opened.asked_at
    return [_pictured(opened, views_ask.answer(opened, question, c, BEST, c == steps[-1])) for c in steps]


def _compared(opened: Opened, name: str) -> shapes.Comparison | None:
    """The first two queries of the set."""
    if size(opened.sets[name]) < 2:
        return None
    left, right = (views_ask.stored(opened, name, q) for q in (0, 1))
    found = views_ask.compare(opened, left, right, None, BEST)
    sides = {side: _pictured(opened, getattr(found, side)) for side in ("left", "right")}
    return found.model_copy(update=sides)


def report(found: Report) -> str:
    """The whole file as text."""
    files = {name: Markup(body.decode()) for name, (_, body) in static().items()}
    inside = {"style": files["style.css"], "script": files["page.js"], "plotly": files["plotly.min.js"]}
    drawn = {name: made for name, made in _figures(found).items() if made is not None}
    more = {"timeline_words": TIMELINE, "version": __version__, "prefix": {}, "sets": [], "alone": True}
    said = {"lateness": lateness(found.hurt)}
    page = environment().get_template("report.html").render(it=found, figures=drawn, **inside, **more, **said)
    return page.replace(ON_PAGE, IN_FILE)  # a report has no JSON beside it


def _figures(found: Report) -> dict[str, Figure | None]:
    replay = found.answer.replay or []
    drawn = {
        "timeline": figures.timeline(found.timeline),
        "loss": figures.loss(found.timeline.loss),
        **_of_sources(found.sources),
        "harmful": figures.harmful(found.hurt.items),
        "followed": figures.followed(found.followed),
        **_of_life(found.life),
        "pace": figures.pace(found.answer.timeline),
        "replay_helpful": figures.places(found.answer.helpful, replay, "helpful", HELPED),
        "replay_harmful": figures.places(found.answer.harmful, replay, "harmful", HURT),
        "compare": None if found.compared is None else _two(found.compared),
    }
    return {name: _unlinked(made) for name, made in drawn.items()}


def _of_sources(found: shapes.Sources | None) -> Mapping[str, Figure | None]:
    return {} if found is None else {"sources": figures.sources(found), "matrix": figures.matrix(found)}


def _of_life(found: shapes.Life | None) -> Mapping[str, Figure | None]:
    if found is None:
        return {}
    return {"occurrences": figures.occurrences(found.occurrences), "erasers": figures.erasers(found.erased_by or [])}


def _two(found: shapes.Comparison) -> Figure | None:
    return figures.compared(found.left.timeline, found.right.timeline)


def _unlinked(made: Figure | None) -> Figure | None:
    if made is not None:
        made["layout"]["meta"].pop("links", None)
    return made


def _pictured(opened: Opened, answer: shapes.Answer) -> shapes.Answer:
    """An answer whose pictures are in the page."""
    sides: dict[str, Any] = {"helpful": _alone(opened, answer.helpful), "harmful": _alone(opened, answer.harmful)}
    return answer.model_copy(update=sides)


def _alone(opened: Opened, hits: Sequence[shapes.Hit]) -> list[shapes.Hit]:
    """Hits whose pictures are in the page."""
    return [h.model_copy(update={"sample": _held(opened, h.sample)}) for h in hits]


def _held(opened: Opened, sample: shapes.Sample) -> shapes.Sample:
    if sample.image is None:
        return sample
    data = base64.b64encode(opened.catalogue.image(opened.catalogue.number(sample.id))).decode()
    return sample.model_copy(update={"image": f"data:image/png;base64,{data}"})
