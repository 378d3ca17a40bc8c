"""Figures of the pages: one function for each, from shapes to Plotly's own JSON; None where there is nothing to draw."""

from collections.abc import Mapping, Sequence

from . import schemas as shapes
from .drawing import (
    ACCENT,
    BARS,
    HELPED,
    HURT,
    INK,
    MUTED,
    PLAIN,
    SURFACE,
    WARM,
    Figure,
    across,
    bars,
    bounded,
    figure,
    key,
    line,
    named,
    signed,
    smoothed,
    thinned,
)
from .schemas import Number
from .words import labelled

SIGNS = {"helps": HELPED, "hurts": HURT, "not clear": PLAIN}
SHADES = {"warm-up": WARM, "basin": PLAIN, "ascent": ACCENT}
PLACES = {"mode": "lines+markers+text", "textposition": "middle right", "cliponaxis": False}
DASHES = ("solid", "dash", "dot")
NARROW = 0.08  # of the run: a band whose name would run into the next
NAMED, FIRST = 6, 2  # samples whose places are drawn: of now, and of every checkpoint
BARS_OF_ERASERS = 10
STEP = "training step"


def timeline(found: shapes.Timeline) -> Figure:
    """Influence by learning rate, each step and smoothed, with the phases shaded."""
    steps, each = thinned(found.per_rate)
    _, sizes = thinned(found.size)
    lines = [
        line(steps, each, "each step", PLAIN, opacity=0.55, width=1),
        line(steps, smoothed(each), "smoothed", ACCENT),
        line(steps, smoothed(sizes), "mean size (without sign), smoothed", WARM, dash="dot"),
    ]
    drawn = figure(lines, STEP, "influence by learning rate", height=380)
    return shaded(bounded(drawn), found.phases)


def shaded(drawn: Figure, phases: shapes.Phases) -> Figure:
    """The phases as coloured bands with their names; nothing where they were not found."""
    for name, first, last in bands(phases):
        box = {"type": "rect", "xref": "x", "yref": "paper", "x0": first, "x1": last, "y0": 0, "y1": 1}
        look = {"fillcolor": SHADES[name], "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
        drawn["layout"]["shapes"].append({**box, **look})
        if last - first < NARROW * phases.steps:
            continue  # no room for its name
        words = {
            "text": named(name),
            "x": (first + last) / 2,
            "y": 1,
            "xref": "x",
            "yref": "paper",
            "yanchor": "bottom",
        }
        drawn["layout"]["annotations"].append({**words, "showarrow": False, "font": {"size": 12, "color": MUTED}})
    return drawn


def bands(phases: shapes.Phases) -> list[tuple[str, int, int]]:
    """`(name, first step, step after the last)` of each phase; none where the phases are not present."""
    first, last = phases.warm_up.boundary, phases.ascent.boundary
    if not phases.present or first is None or last is None:
        return []
    whole = [("warm-up", 0, first), ("basin", first, last), ("ascent", last, phases.steps)]
    return [band for band in whole if band[2] > band[1]]


def loss(values: Sequence[Number]) -> Figure | None:
    """The training loss of each step; None where none was recorded."""
    steps, each = thinned(values)
    if all(x is None for x in each):
        return None
    lines = [
        line(steps, each, "each step", PLAIN, opacity=0.6, width=1, said=".3g"),
        line(steps, smoothed(each), "smoothed", INK, said=".3g"),
    ]
    return figure(lines, STEP, "training loss", height=280)


def pace(found: shapes.Pace) -> Figure | None:
    """The query's own timeline: bars above zero helped, below zero hurt."""
    if not found.steps:
        return None
    places, each = thinned(found.influence, BARS)
    steps = [found.steps[int(k)] for k in places]
    size = line(steps, thinned(found.size, BARS)[1], "mean size of a single use (without sign)", WARM, dash="dot")
    name = "influence of a step" + (" (mean)" if len(found.steps) > BARS else "")
    drawn = figure([bars(steps, each, "step %{x}: %{y:+.3g}"), size], STEP, name, height=280)
    signs = [{"name": n, "colour": c, "dash": "solid"} for n, c in (("step helped", HELPED), ("step hurt", HURT))]
    drawn["layout"]["meta"]["key"] = [*signs, *drawn["layout"]["meta"]["key"]]
    return drawn


def compared(left: shapes.Pace, right: shapes.Pace) -> Figure | None:
    """The timelines of two queries."""
    if not left.steps or not right.steps:
        return None
    lines = []
    for name, found, colour, dash in (("first query", left, ACCENT, "solid"), ("second query", right, WARM, "dash")):
        places, each = thinned(found.influence)
        lines.append(line([found.steps[int(k)] for k in places], smoothed(each), name, colour, dash=dash))
    return figure(lines, STEP, "influence of a step, smoothed", height=320)


def places(now: Sequence[shapes.Hit], replay: Sequence[shapes.Ranking], side: str, colour: str) -> Figure | None:
    """The places of the first samples of now, and of those that were first at any checkpoint, in all rankings."""
    ranked: list[list[str]] = [getattr(r, side) for r in replay]
    ours = [h.sample.id for h in now[:NAMED]]
    lines = []
    for name in dict.fromkeys([*ours, *(name for ids in ranked for name in ids[:FIRST])]):
        found = [ids.index(name) + 1 if name in ids else None for ids in ranked]
        last = max((k for k, y in enumerate(found) if y is not None), default=None)
        if last is not None:
            mine = name in ours  # only these have their names beside them: there is room for no more
            drawn = line([r.at for r in replay], found, named(name), colour, opacity=1 if mine else 0.4, said="d")
            text = [named(name, 12) if mine and k == last else "" for k in range(len(found))]
            lines.append({**drawn, **PLACES, "text": text})
    if not lines:
        return None
    out = figure(lines, "checkpoint (step)", "place in the ranking", height=340)
    out["layout"]["yaxis"] |= {"autorange": "reversed", "dtick": 1, "zeroline": False}
    out["layout"]["xaxis"] |= {"tickvals": [r.at for r in replay]}
    out["layout"]["margin"]["r"] = 90
    return out


def evolution(found: Sequence[shapes.AtCheckpoint]) -> Figure | None:
    """A sample's influence on the model at every checkpoint."""
    if not found:
        return None
    drawn = line([x.at for x in found], [x.influence for x in found], "influence", ACCENT)
    out = figure([{**drawn, "mode": "lines+markers"}], "checkpoint (step)", "influence", height=280)
    out["layout"]["xaxis"] |= {"tickvals": [x.at for x in found]}
    return out


def followed(found: Mapping[str, Sequence[shapes.AtCheckpoint]]) -> Figure | None:
    """The influence of several samples on the model at every checkpoint, in the colour of their sign at the last one."""
    lines = []
    for k, (name, values) in enumerate(found.items()):
        y = [x.influence for x in values]
        drawn = line([x.at for x in values], y, named(name), signed(y)[-1], dash=DASHES[k % len(DASHES)])
        lines.append(drawn)
    if not lines:
        return None
    dotted = [{**x, "mode": "lines+markers"} for x in lines]
    out = figure(dotted, "checkpoint (step)", "influence", height=340, key=key(lines))
    out["layout"]["xaxis"] |= {"tickvals": [x.at for x in next(iter(found.values()))]}
    return out


def occurrences(found: Sequence[shapes.Occurrence]) -> Figure | None:
    """A sample's single uses."""
    if not found:
        return None
    drawn = bars([f"step {x.step}" for x in found], [x.influence for x in found], "%{x}: %{y:+.3g}")
    drawn |= {"width": 0.2} if len(found) < 4 else {}
    out = figure([drawn], "", "influence", height=280)
    out["layout"]["xaxis"] |= {"type": "category", "nticks": 8}
    return out


def erasers(found: Sequence[shapes.Eraser]) -> Figure | None:
    """The later samples that took most."""
    if not found:
        return None
    found = found[:BARS_OF_ERASERS]
    values, links = [x.erased for x in found], [x.sample.path for x in found]
    return across([x.sample.id for x in found], values, "influence taken away", links, colours=[WARM] * len(found))


def sources(found: shapes.Sources) -> Figure | None:
    """The value of each source, with its interval; grey where that includes 0."""
    if not found.sources:
        return None
    reach: Figure = {"type": "data", "symmetric": False, "color": MUTED, "thickness": 1.5, "width": 4}
    reach |= {
        "array": [s.high - s.value for s in found.sources],
        "arrayminus": [s.value - s.low for s in found.sources],
    }
    names, links = [labelled(s.name, found.by) for s in found.sources], [s.path for s in found.sources]
    colours = [SIGNS[s.words] for s in found.sources]
    return across(names, [s.value for s in found.sources], "summed influence", links, colours=colours, error=reach)


def matrix(found: shapes.Sources) -> Figure | None:
    """Sources down, domains across; green helped, red hurt, grey where the interval of a cell includes 0."""
    if len(found.domains) < 2 or not found.sources:
        return None
    most = max((abs(x) for row in found.matrix for x in row), default=0.0) or 1.0
    words = {"text": "− hurt      + helped", "side": "bottom"}
    bar = {"orientation": "h", "y": -0.1, "yanchor": "top", "thickness": 10, "title": words}
    cells: Figure = {"type": "heatmap", "z": found.matrix, "zmin": -most, "zmax": most, "xgap": 2, "ygap": 2}
    place = {
        "x": [named(x) for x in found.domains],
        "y": [named(labelled(s.name, found.by)) for s in found.sources],
    }
    cells |= {
        **place,
        "colorbar": bar,
        "colorscale": [[0.0, HURT], [0.5, SURFACE], [1.0, HELPED]],
        "hovertemplate": "%{y} for %{x}: %{z:+.3g}<extra></extra>",
    }
    out = figure([cells, *_unclear(found, place)], "", "", height=170 + 34 * len(found.sources))
    out["layout"]["yaxis"] |= {"autorange": "reversed", "showgrid": False, "type": "category"}
    out["layout"]["xaxis"] |= {"side": "top", "showgrid": False, "tickangle": -35, "type": "category"}
    return out


def _unclear(found: shapes.Sources, place: Figure) -> list[Figure]:
    """Grey over the cells whose sign is not clear."""
    z = [[None if sure else 0 for sure in line] for line in found.clear]
    if not any(0 in line for line in z):
        return []
    grey = {"colorscale": [[0.0, PLAIN], [1.0, PLAIN]], "showscale": False, "customdata": found.matrix}
    said = "%{y} for %{x}: %{customdata:+.3g}, not clear<extra></extra>"
    return [{"type": "heatmap", "z": z, "xgap": 2, "ygap": 2, "hovertemplate": said, **place, **grey}]


def harmful(found: Sequence[shapes.Hit]) -> Figure | None:
    """Influences of a ranking, first to last; a click leads to the sample."""
    if not found:
        return None
    drawn = bars(range(1, len(found) + 1), [h.influence for h in found], "place %{x}, sample %{customdata}: %{y:+.3g}")
    links = [h.sample.path for h in found]
    out = figure(
        [{**drawn, "customdata": [named(h.sample.id) for h in found]}], "place in the ranking", "influence", height=260
    )
    out["layout"]["meta"]["links"] = links
    return out
