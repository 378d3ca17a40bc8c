"""The report of a run: one HTML file with style, script, figures and pictures in it, and the same as PDF where Chromium is.

It states that it contains training data. Nothing in it leads elsewhere.
Knows nothing of the command line.
"""

import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from .. import __version__
from ..errors import StoreError, UnsupportedError
from ..insight.harmful import UNIT
from . import figures, shapes, views, views_ask
from .drawing import Figure
from .opened import Opened
from .pages import TIMELINE, environment, static
from .ranking import both

BEST = 6  # samples on either side
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
SECONDS = 180  # for a PDF


class Report(shapes.Shape):
    """What a report shows."""

    overview: shapes.Overview
    timeline: shapes.Timeline
    sources: shapes.Sources | None
    helpful: list[shapes.Hit]
    harmful: list[shapes.Hit]
    answer: shapes.Answer
    unit: str = UNIT


def gathered(opened: Opened, queries: str | None = None) -> Report:
    """Everything that a report shows, for one query set; sources for all of them."""
    name, has = opened.named(queries), opened.catalogue.has
    helpful, harmful = both(opened.mean(name, opened.final).scores[0], opened.catalogue, BEST, None)
    known = has.source or has.label
    worked = views_ask.answer(opened, views_ask.stored(opened, name, 0), None, BEST, False)
    return Report(
        overview=views.overview(opened),
        timeline=views.timeline(opened, name, None),
        sources=views.sources(opened, list(opened.sets), None, None)[1] if known else None,
        helpful=_alone(opened, [h for h in helpful if h.influence > 0]),
        harmful=_alone(opened, [h for h in harmful if h.influence < 0]),
        answer=worked.model_copy(
            update={"helpful": _alone(opened, worked.helpful), "harmful": _alone(opened, worked.harmful)}
        ),
    )


def report(found: Report) -> str:
    """The whole file as text."""
    files = {name: Markup(body.decode()) for name, (_, body) in static().items()}
    inside = {"style": files["style.css"], "script": files["page.js"], "plotly": files["plotly.min.js"]}
    drawn = {name: made for name, made in _figures(found).items() if made is not None}
    more = {"timeline_words": TIMELINE, "version": __version__, "prefix": {}, "sets": [], "alone": True}
    return environment().get_template("report.html").render(it=found, figures=drawn, **inside, **more)


def browser() -> str:
    """The browser that prints."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UnsupportedError(
            "a PDF is printed by Chromium, and none was found. Install Chromium or Chrome, or open the report in a browser and "
            "print it from there."
        )
    return found


def pdf(page: Path, out: Path) -> None:
    """A page as Chromium prints it."""
    name = browser()
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(_command(name, profile, page, out), capture_output=True, text=True, timeout=SECONDS)
    if not out.exists():
        said = " ".join(done.stderr.split())[-300:]
        raise StoreError(f"{name} wrote no PDF ({said}). Open the report in a browser and print it from there.")


def _command(name: str, profile: str, page: Path, out: Path) -> list[str]:
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    quiet = ["--headless", "--disable-gpu", "--no-first-run", "--no-pdf-header-footer", "--window-size=760,1080"]
    waits = ["--virtual-time-budget=20000", f"--user-data-dir={profile}"]
    return [name, *root, *quiet, *waits, f"--print-to-pdf={out.resolve()}", page.resolve().as_uri()]


def _figures(found: Report) -> dict[str, Figure | None]:
    values: dict[str, Figure | None] = {}
    if found.sources is not None:
        values = {"sources": figures.sources(found.sources), "matrix": figures.matrix(found.sources)}
    drawn = {"timeline": figures.timeline(found.timeline), "loss": figures.loss(found.timeline.loss), **values}
    return {name: _unlinked(made) for name, made in {**drawn, "pace": figures.pace(found.answer.timeline)}.items()}


def _unlinked(made: Figure | None) -> Figure | None:
    if made is not None:
        made["layout"]["meta"].pop("links", None)
    return made


def _alone(opened: Opened, hits: Sequence[shapes.Hit]) -> list[shapes.Hit]:
    """Hits whose pictures are in the page."""
    return [h.model_copy(update={"sample": _held(opened, h.sample)}) for h in hits]


def _held(opened: Opened, sample: shapes.Sample) -> shapes.Sample:
    if sample.image is None:
        return sample
    data = base64.b64encode(opened.catalogue.image(opened.catalogue.number(sample.id))).decode()
    return sample.model_copy(update={"image": f"data:image/png;base64,{data}"})
