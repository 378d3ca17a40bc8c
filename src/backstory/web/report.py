"""The report of a run: one HTML file with style, script, figures and pictures in it.

It states that it contains training data. Nothing in it leads elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from .. import __version__
from ..replay.queries import size
from ..results.figures import Figure
from ..results.result import Result
from . import views
from .pages import TIMELINE, environment, static
from .queries import parse_stored, show_comparison, show_influence
from .state import State
from .views import View, data_url

BEST = 6  # results per side
FOLLOWED = 3  # of them, whose influence is followed over training
WORST = 20  # in the table of what hurt
ON_PAGE = "<noscript>Figures need JavaScript; the numbers are in this page's JSON.</noscript>"
IN_FILE = "<noscript>Figures need JavaScript; the numbers are in the source of this file, after this place.</noscript>"


def gather(state: State, *, check: Result | None = None, caveats: Sequence[str] = ()) -> View:
    """Everything that a report shows, for the default query set; sources for all domains, as on the page.

    `check` compares the results with retraining; `caveats` stand before those of the run.
    """
    name, has = state.named(None), state.catalogue.has
    ranking, query = views.harmful(state, name, WORST, None), parse_stored(state, name, 0)
    best, worst = ([x["sample"] for x in ranking.data[side]] for side in ("helpful", "harmful"))
    results = [show_influence(state, query, c, BEST, c == state.queryable[-1]) for c in state.queryable]
    parts: dict[str, View | None] = {
        "overview": views.overview(state),
        "timeline": views.timeline(state, name, None),
        "sources": views.sources(state, None, None, None) if has["source"] or has["label"] else None,
        "harmful": ranking,
        "followed": _follow(state, name, [*best[:FOLLOWED], *worst[:FOLLOWED]]),
        "sample": views.sample(state, str(best[0]), name, True) if best else None,
        "compared": _compare(state, name),
        "check": None if check is None else View(check.as_dict(), check.drawings()),
    }
    data: dict[str, Any] = {key: None if view is None else view.data for key, view in parts.items()}
    data["overview"] |= {"caveats": [*caveats, *data["overview"]["caveats"]]}
    shown = [view for view in (*parts.values(), results[-1]) if view is not None]
    drawn = {name: figure for view in shown for name, figure in view.figures.items()}
    data |= {"queries": name, "results": [view.data for view in results], "best": BEST}
    return View(_with_images(state, data), drawn)


def _follow(state: State, name: str, samples: Sequence[int | str]) -> View | None:
    """How the influence of some samples went."""
    if not samples:
        return None
    groups = {str(x): [x] for x in samples}
    went = state.evolution(name, groups).only(*groups)
    return View(went.as_dict(), {"followed": went.drawings(signs=True)["evolution"]})


def _compare(state: State, name: str) -> View | None:
    """The first two queries of the set."""
    if size(state.sets[name]) < 2:
        return None
    left, right = (parse_stored(state, name, q) for q in (0, 1))
    return show_comparison(state, left, right, None, BEST)


def render_report(view: View) -> str:
    """The whole file as text."""
    files = {name: Markup(body.decode()) for name, (_, body) in static().items()}
    inside = {"style": files["style.css"], "script": files["page.js"], "plotly": files["plotly.min.js"]}
    more = {"timeline_words": TIMELINE, "version": __version__, "prefix": {}, "sets": [], "alone": True}
    drawn = {name: _unlinked(figure) for name, figure in view.figures.items()}
    page = environment().get_template("report.html").render(it=view.data, figures=drawn, **inside, **more)
    return page.replace(ON_PAGE, IN_FILE)  # a report has no JSON beside it


def _unlinked(figure: Figure) -> Figure:
    figure["layout"]["meta"].pop("links", None)
    return figure


def _with_images(state: State, data: Any) -> Any:
    """The same values, with the pictures of samples in them instead of their paths."""
    if isinstance(data, Mapping):
        inside = {key: _with_images(state, value) for key, value in data.items()}
        if str(data.get("image")).startswith("/images/"):
            inside["image"] = data_url(views.image(state, data["id"]))
        return inside
    return [_with_images(state, value) for value in data] if isinstance(data, list) else data
