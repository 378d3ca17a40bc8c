"""Figures of all results: plain values in, Plotly JSON out; None if there is nothing to draw.

A colour is a name such as "var(--helped)": a page puts its own in, so that one figure serves light and dark, and `to_plotly`
puts in plain ones for notebooks and files. Curves of more than `POINTS` steps are drawn as means over equal parts, so that a page
stays small however long the run was. `layout.meta` has what a page may use: `key` to the colours, and `items`, the ids or
names that bars stand for.
"""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .quality import RANKS, Quality, two_digits

Figure = dict[str, Any]
Strip = Sequence[tuple[int, int, float | None, bool]]  # of each tenth: first step, step after the last, rank, weak
Number = float | None
Numbers = Iterable[Number]
POINTS, BARS = 1000, 160
INK, MUTED, LINE, SURFACE = "var(--ink)", "var(--muted)", "var(--line)", "var(--surface)"
HELPED, HURT, ACCENT, WARM, PLAIN = "var(--helped)", "var(--hurt)", "var(--accent)", "var(--warm)", "var(--plain)"
COLOURS = {
    INK: "#1e252b", MUTED: "#56606a", LINE: "#dedad1", SURFACE: "#ffffff", HELPED: "#0d6b53", HURT: "#a33a2c",
    ACCENT: "#1d5b86", WARM: "#8a5a00", PLAIN: "#7b858f",
}  # fmt: skip
SIGNS = {"helps": HELPED, "hurts": HURT, "not clear": PLAIN}
SHADES = {"fall": WARM, "low": PLAIN, "rise": ACCENT}
SERIES = (ACCENT, WARM, HELPED, HURT, PLAIN, INK)
DASHES = ("solid", "dash", "dot")
PLACES = {"mode": "lines+markers+text", "textposition": "middle right", "cliponaxis": False}
FARTHEST = 3  # times the reach of all values but the farthest: beyond it an axis hides the rest
CLEAR = "rgba(0,0,0,0)"
LONGEST = 28  # letters of a name beside a figure
NARROW = 0.08  # of the run: a band whose name would run into the next
NAMED, FIRST = 6, 2  # samples whose places are drawn: of now, and of every checkpoint
MOST_BARS = 10  # of samples below each other
CELL_HEIGHT = 15  # pixels of a strip below a time axis
CELLS = {
    False: "strip: quality, a rank correlation",
    True: f"outlined, grey above: below {RANKS:.2f}, not reliable",
}
CELLS_DRAWN = {False: "full", True: "open"}
CELL: Figure = {"ysizemode": "pixel", "yanchor": 0, "y0": -2, "y1": -2 - CELL_HEIGHT}
GREY: Figure = {"fillcolor": LINE, "opacity": 0.6, "name": CELLS[True]}
STEP, CHECKPOINT = "training step", "checkpoint (step)"


def drawable(**figures: Figure | None) -> dict[str, Figure]:
    """Figures by name, without those that have nothing to draw."""
    return {name: drawn for name, drawn in figures.items() if drawn is not None}


# -- results -------------------------------------------------------------------------------------------------------


def timeline(
    per_rate: Numbers, size: Numbers, bands: Sequence[tuple[str, int, int]] = (), steps: int = 0, strip: Strip = ()
) -> Figure:
    """Influence per unit of learning rate, each step and smoothed, and its mean magnitude; the phases `(name, first, end)` shaded."""
    x, each = thinned(numbers(per_rate))
    _, sizes = thinned(numbers(size))
    lines = [
        line(x, each, "each step", PLAIN, opacity=0.55, width=1),
        line(x, smoothed(each), "smoothed", ACCENT),
        line(x, smoothed(sizes), "mean |influence|, smoothed", WARM, dash="dot"),
    ]
    drawn = bounded(figure(lines, STEP, "influence / learning rate", height=380))
    for name, first, end in bands:
        _shade(drawn, name, first, end, wide=end - first >= NARROW * steps)
    return graded(drawn, strip)


def strip(quality: Quality | None) -> Strip:
    """The measured quality of each tenth of the run, the worse of its two correlations, for a strip under a time axis; empty where there is none."""
    if quality is None or quality.exact:
        return ()
    weak = quality.weak
    return tuple(
        (x.first, x.last, rank, any(first <= x.first < last for first, last in weak))
        for x, rank in zip(quality.tenths, quality.by_tenth, strict=True)
    )


def graded(drawn: Figure, strip: Strip) -> Figure:
    """The figure with a strip under its time axis, one cell for each tenth, and grey over the parts that are not ranked."""
    if not strip:
        return drawn
    layout, shapes = drawn["layout"], drawn["layout"]["shapes"]
    for weak, cells in groupby(strip, key=lambda cell: cell[3]):
        spans = [(first - 0.5, last - 0.5, rank) for first, last, rank, _ in cells]
        if weak:
            shapes.append(_box(spans[0][0], spans[-1][1]) | GREY | {"y0": 0, "y1": 1})
        shapes += [_box(first, last) | CELL | _look(rank, weak) for first, last, rank in spans]
    layout["xaxis"] |= {"ticks": "outside", "ticklen": CELL_HEIGHT + 4, "tickcolor": CLEAR}  # labels below the strip
    for name in CELLS.values():  # in a legend, where there is one
        for cell in [x for x in shapes if "label" in x and x["name"] == name][:1]:
            cell["showlegend"] = True
    weak = any(cell[3] for cell in strip)
    layout["meta"]["key"] += [
        {"name": CELLS[x], "colour": MUTED, "dash": CELLS_DRAWN[x]} for x in (False, True)[: 1 + weak]
    ]
    return drawn


def _box(first: float, last: float) -> Figure:
    return {"type": "rect", "xref": "x", "yref": "paper", "x0": first, "x1": last, "line": {"width": 0}}


def _look(rank: Number, weak: bool) -> Figure:
    """A cell with its rank correlation in it: filled where the tenth is ranked, else an outline."""
    words = "–" if rank is None else two_digits(rank).replace("0.", ".", 1).replace("-", "−").replace("1.00", "1.0")
    label = {"text": words, "font": {"size": 10, "color": MUTED if weak else SURFACE}}
    edge = {"color": MUTED if weak else SURFACE, "width": 1}
    return {"name": CELLS[weak], "fillcolor": CLEAR if weak else MUTED, "label": label, "line": edge}


def _shade(drawn: Figure, name: str, first: int, end: int, *, wide: bool) -> None:
    """A coloured band, with its name where there is room for it."""
    box = {"type": "rect", "xref": "x", "yref": "paper", "x0": first, "x1": end, "y0": 0, "y1": 1}
    look = {"fillcolor": SHADES[name], "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
    drawn["layout"]["shapes"].append({**box, **look})
    if wide:
        place = {"x": (first + end) / 2, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom"}
        words = {"text": named(name), "showarrow": False, "font": {"size": 12, "color": MUTED}}
        drawn["layout"]["annotations"].append({**place, **words})


def loss(values: Numbers) -> Figure | None:
    """The training loss of each step; None where none was recorded."""
    steps, each = thinned(numbers(values))
    if all(x is None for x in each):
        return None
    lines = [
        line(steps, each, "each step", PLAIN, opacity=0.6, width=1, digits=".3g"),
        line(steps, smoothed(each), "smoothed", INK, digits=".3g"),
    ]
    return figure(lines, STEP, "training loss", height=280)


def by_step(steps: Any, influence: Numbers, size: Numbers, strip: Strip = ()) -> Figure | None:
    """A query's own timeline: bars above zero helped, below zero hurt."""
    if not len(steps):
        return None
    places, each = thinned(numbers(influence), BARS)
    x = [int(steps[int(k)]) for k in places]
    sizes = line(x, thinned(numbers(size), BARS)[1], "mean |influence| of a use", WARM, dash="dot")
    name = "influence of a step" + (" (mean)" if len(steps) > BARS else "")
    drawn = figure([bars(x, each, "step %{x}: %{y:+.3g}"), sizes], STEP, name, height=280)
    signs = [{"name": n, "colour": c, "dash": "solid"} for n, c in (("step helped", HELPED), ("step hurt", HURT))]
    drawn["layout"]["meta"]["key"] = [*signs, *drawn["layout"]["meta"]["key"]]
    return graded(drawn, strip)


def compared(left: tuple[Any, Numbers], right: tuple[Any, Numbers]) -> Figure | None:
    """The timelines of two queries: `(steps, influence)` each."""
    lines, looks = [], (("first query", ACCENT, "solid"), ("second query", WARM, "dash"))
    for (name, colour, dash), (steps, influence) in zip(looks, (left, right), strict=True):
        places, each = thinned(numbers(influence))
        lines.append(line([int(steps[int(k)]) for k in places], smoothed(each), name, colour, dash=dash))
    known = all(len(steps) for steps, _ in (left, right))
    return figure(lines, STEP, "influence of a step, smoothed", height=320) if known else None


def places(now: Sequence[str], at: Sequence[int], rankings: Sequence[Sequence[str]], colour: str) -> Figure | None:
    """The places of the first samples of now, and of those that were first at any checkpoint, in all rankings."""
    ours = list(now[:NAMED])
    lines = []
    for name in dict.fromkeys([*ours, *(name for ids in rankings for name in ids[:FIRST])]):
        ranks = [ids.index(name) + 1 if name in ids else None for ids in rankings]
        last = max((k for k, y in enumerate(ranks) if y is not None), default=None)
        if last is not None:
            mine = name in ours  # only these have their names beside them: there is room for no more
            drawn = line(at, ranks, named(name), colour, opacity=1 if mine else 0.4, digits="d")
            text = [named(name, 12) if mine and k == last else "" for k in range(len(ranks))]
            lines.append({**drawn, **PLACES, "text": text})
    if not lines:
        return None
    out = _at_checkpoints(lines, at, "rank")
    out["layout"]["yaxis"] |= {"autorange": "reversed", "dtick": 1, "zeroline": False}
    out["layout"]["margin"]["r"] = 90
    return out


def evolution(checkpoints: Sequence[int], groups: Mapping[str, Numbers], *, signs: bool = False) -> Figure | None:
    """One line for each group or sample over the checkpoints; with `signs` in the colour of its last sign."""
    lines = []
    for k, (name, values) in enumerate(groups.items()):
        y = numbers(values)
        colour, dash = (signed(y)[-1], DASHES[k % len(DASHES)]) if signs else (SERIES[k % len(SERIES)], "solid")
        lines.append(line(checkpoints, y, named(name), colour, dash=dash))
    if not lines or not len(checkpoints):
        return None
    dotted = [{**one, "mode": "lines+markers"} for one in lines]
    return _at_checkpoints(dotted, checkpoints, "influence", key=key(lines))


def _at_checkpoints(lines: list[Figure], at: Sequence[int], y: str, **meta: Any) -> Figure:
    out = figure(lines, CHECKPOINT, y, height=340 if len(lines) > 1 else 280, **meta)
    out["layout"]["xaxis"] |= {"tickvals": list(at)}
    return out


def occurrences(steps: Sequence[int], influence: Numbers) -> Figure | None:
    """A sample's single uses."""
    if not len(steps):
        return None
    drawn = bars([f"step {x}" for x in steps], numbers(influence), "%{x}: %{y:+.3g}")
    drawn |= {"width": 0.2} if len(steps) < 4 else {}
    out = figure([drawn], "", "influence", height=280)
    out["layout"]["xaxis"] |= {"type": "category", "nticks": 8}
    return out


def overwriters(samples: Sequence[str], values: Sequence[float]) -> Figure | None:
    """The later samples that took most."""
    if not samples:
        return None
    most = values[:MOST_BARS]
    return across(samples[:MOST_BARS], most, "influence overwritten", colours=[WARM] * len(most))


def overwritten(by_step: Numbers, whole: float) -> Figure:
    """What each step took away, and what was left of `whole` after it."""
    x, taken = thinned(numbers(by_step), BARS)
    left = thinned(numbers(whole - np.cumsum(np.asarray(by_step))), BARS)[1]
    bar = {**bars(x, taken, "step %{x}: %{y:+.3g}"), "marker": {"color": WARM}, "name": "overwritten by the step"}
    return figure([bar, line(x, left, "remaining influence", ACCENT)], STEP, "influence", height=320)


def sources(names: Sequence[str], rows: Sequence[tuple[float, float, float]], words: Sequence[str]) -> Figure | None:
    """The value of each source with its interval, `(value, low, high)`; grey where that includes 0."""
    if not names:
        return None
    reach: Figure = {"type": "data", "symmetric": False, "color": MUTED, "thickness": 1.5, "width": 4}
    reach |= {"array": [high - x for x, _, high in rows], "arrayminus": [x - low for x, low, _ in rows]}
    values, colours = [x for x, _, _ in rows], [SIGNS[w] for w in words]
    return across(names, values, "summed influence", colours=colours, error=reach)


def matrix(
    names: Sequence[str], domains: Sequence[str], z: Sequence[Sequence[float]], clear: Sequence[Sequence[bool]]
) -> Figure | None:
    """Sources down, domains across; green helped, red hurt, grey where the interval of a cell includes 0."""
    if len(domains) < 2 or not names:
        return None
    most = max((abs(x) for row in z for x in row), default=0.0) or 1.0
    words = {"text": "− hurt      + helped", "side": "bottom"}
    bar = {"orientation": "h", "y": -0.1, "yanchor": "top", "thickness": 10, "title": words}
    place = {"x": [named(x) for x in domains], "y": [named(x) for x in names], "xgap": 2, "ygap": 2}
    cells: Figure = {"type": "heatmap", "z": [list(row) for row in z], "zmin": -most, "zmax": most, **place}
    hover = "%{y} for %{x}: %{z:+.3g}<extra></extra>"
    scale = [[0.0, HURT], [0.5, SURFACE], [1.0, HELPED]]
    cells |= {"colorbar": bar, "colorscale": scale, "hovertemplate": hover}
    out = figure([cells, *_unclear(cells["z"], clear, place)], "", "", height=170 + 34 * len(names))
    out["layout"]["yaxis"] |= {"autorange": "reversed", "showgrid": False, "type": "category"}
    out["layout"]["xaxis"] |= {"side": "top", "showgrid": False, "tickangle": -35, "type": "category"}
    return out


def _unclear(z: list[list[float]], clear: Sequence[Sequence[bool]], place: Figure) -> list[Figure]:
    """Grey over the cells whose sign is not clear."""
    cells = [[None if sure else 0 for sure in row] for row in clear]
    if not any(0 in row for row in cells):
        return []
    grey = {"colorscale": [[0.0, PLAIN], [1.0, PLAIN]], "showscale": False, "customdata": z}
    hover = "%{y} for %{x}: %{customdata:+.3g}, not clear<extra></extra>"
    return [{"type": "heatmap", "z": cells, "hovertemplate": hover, **place, **grey}]


def ranking(samples: Sequence[str], influence: Numbers) -> Figure | None:
    """Influences of a ranking, first to last."""
    if not samples:
        return None
    each = bars(range(1, len(samples) + 1), numbers(influence), "rank %{x}, sample %{customdata}: %{y:+.3g}")
    each["customdata"] = [named(x) for x in samples]
    return figure([each], "rank", "influence", height=260, items=list(samples))


def checked(
    names: Sequence[str], predicted: Sequence[float], retrained: Sequence[float], random: Sequence[bool]
) -> Figure | None:
    """One point for each prediction and its outcome, beside the line on which both are equal."""
    if not names:
        return None
    ends = [min(predicted), max(predicted)]
    traces = [line(ends, ends, "equal", PLAIN, dash="dot")]
    for drawn, name, colour in ((False, "first or last", ACCENT), (True, "drawn at random", WARM)):
        part = [k for k, x in enumerate(random) if x == drawn]
        place = {"x": [predicted[k] for k in part], "y": [retrained[k] for k in part], "name": name}
        hover = "%{customdata}: predicted %{x:+.3g}, retrained %{y:+.3g}<extra></extra>"
        look = {"type": "scatter", "mode": "markers", "marker": {"color": colour, "size": 7, "opacity": 0.75}}
        traces.append({**look, **place, "customdata": [named(names[k]) for k in part], "hovertemplate": hover})
    key = [
        {"name": t["name"], "colour": (t.get("line") or t["marker"])["color"], "dash": "dot"} for t in traces if t["x"]
    ]
    return figure(traces, "predicted influence", "retrained: change of the loss", height=380, key=key)


def ranks(values: Numbers) -> Figure:
    """Ranks of all queries, sorted, on an axis of powers."""
    y = sorted(x for x in numbers(values) if x is not None)
    drawn = figure(
        [line(range(1, len(y) + 1), y, "rank", ACCENT, digits="d")], "queries, sorted by rank", "rank", height=320
    )
    drawn["layout"]["yaxis"]["type"] = "log"
    return drawn


# -- in notebooks and files -----------------------------------------------------------------------------------------


def to_plotly(drawn: Figure) -> Any:
    """A Plotly figure in plain colours, with a legend where there are several lines."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise UnsupportedError("figures need plotly: pip install '.[plot]' in the checkout.") from error
    text = re.sub(r'"(var\(--[a-z]+\))"', lambda m: f'"{COLOURS[m[1]]}"', json.dumps(drawn))
    made = go.Figure(json.loads(text))
    made.update_layout(template="plotly_white", dragmode="zoom", showlegend=len(drawn["layout"]["meta"]["key"]) > 1)
    made.update_xaxes(fixedrange=False)
    made.update_yaxes(fixedrange=False)
    return made


def page(title: str, words: str, *figures: Any) -> str:
    """One HTML file with Plotly figures and Plotly's script in it: it needs no network."""
    parts = [f.to_html(full_html=False, include_plotlyjs=k == 0) for k, f in enumerate(figures)]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>
<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem">
<h1 style="font-size: 1.4rem">{html.escape(title)}</h1>
<p>{html.escape(words)}</p>
{"".join(parts)}
</body></html>
"""


# -- lines and bars on two axes -------------------------------------------------------------------------------------


def numbers(values: Numbers) -> list[Number]:
    """Plain numbers; what is not finite is None."""
    return [None if x is None or not math.isfinite(x) else float(x) for x in values]


def thinned(values: Sequence[Number], most: int = POINTS) -> tuple[list[float], list[Number]]:
    """`(places, values)`: at most `most` points, each the mean of its part; what is not known is left out."""
    n = len(values)
    edges = [n * k // min(most, n) for k in range(min(most, n) + 1)] if n else []
    return [(lo + hi - 1) / 2 for lo, hi in pairwise(edges)], [_mean(values[lo:hi]) for lo, hi in pairwise(edges)]


def smoothed(values: Sequence[Number], share: float = 0.02) -> list[Number]:
    """Means over the neighbours within `share` of the curve on either side."""
    half = max(1, round(share * len(values)))
    return [_mean(values[max(0, k - half) : k + half + 1]) for k in range(len(values))]


def figure(traces: list[Figure], x: str, y: str, *, height: int, **meta: Any) -> Figure:
    """Traces on two named axes. `meta` goes to the page: a key to the colours, what bars stand for."""
    layout = {
        "height": height,
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"color": INK, "size": 13, "family": "system-ui, sans-serif"},
        "margin": {"l": 56, "r": 16, "t": 26, "b": 48},
        "showlegend": False,
        "hoverlabel": {"bgcolor": SURFACE, "bordercolor": LINE, "font": {"color": INK}},
        "bargap": 0.25,
        "dragmode": False,
        "shapes": [],
        "annotations": [],
        "xaxis": _axis(x),
        "yaxis": _axis(y),
        "meta": {"key": key(traces), **meta},
    }
    return {"data": traces, "layout": layout}


def key(traces: Sequence[Figure]) -> list[dict[str, str]]:
    """Names and colours of lines, where there are several."""
    lines = [t for t in traces if "line" in t and t.get("mode") == "lines"]
    return [
        {"name": t["name"], "colour": t["line"]["color"], "dash": t["line"]["dash"]} for t in lines if len(traces) > 1
    ]


def line(
    x: Sequence[float],
    y: Sequence[Number],
    name: str,
    colour: str,
    *,
    width: float = 2,
    opacity: float = 1,
    dash: str = "solid",
    digits: str = "+.3g",
) -> Figure:
    """One curve."""
    look = {"line": {"color": colour, "width": width, "dash": dash}, "opacity": opacity}
    hover = f"{name}, step %{{x}}: %{{y:{digits}}}<extra></extra>"
    place = {"x": list(x), "y": list(y), "name": name}
    return {"type": "scatter", "mode": "lines", **place, "hovertemplate": hover, **look}


def bounded(drawn: Figure, share: float = 0.01) -> Figure:
    """The figure with an axis that a few far values do not stretch; a triangle at its edge stands for each of them."""
    values = sorted(y for t in drawn["data"] for y in t["y"] if y is not None)
    if not values:
        return drawn
    cut = int(share * len(values))
    low, high = min(0.0, values[cut]), max(0.0, values[-1 - cut])
    if high <= low or max(0.0, values[-1]) - min(0.0, values[0]) <= FARTHEST * (high - low):
        return drawn
    room = 0.08 * (high - low)
    drawn["layout"]["yaxis"]["range"] = [low - room, high + room]
    first = drawn["data"][0]
    far = [(x, y) for x, y in zip(first["x"], first["y"], strict=True) if y is not None and not low <= y <= high]
    return _marked(drawn, far, low - 0.5 * room, high + 0.5 * room)


def _marked(drawn: Figure, far: Sequence[tuple[float, float]], low: float, high: float) -> Figure:
    if not far:
        return drawn
    marks = {"symbol": [f"triangle-{'up' if y > 0 else 'down'}" for _, y in far], "color": INK, "size": 9}
    beyond = [y for _, y in far]
    place = {"x": [x for x, _ in far], "y": [high if y > 0 else low for y in beyond], "customdata": beyond}
    hover = "off the scale, step %{x}: %{customdata:+.3g}<extra></extra>"
    look = {"type": "scatter", "mode": "markers", "name": "off the scale", "marker": marks, "hovertemplate": hover}
    drawn["layout"]["xaxis"]["range"] = [drawn["data"][0]["x"][0], drawn["data"][0]["x"][-1]]
    drawn["data"].append({**look, **place, "cliponaxis": False})
    ends = dict.fromkeys(f"{y:+.2g}" for y in (min(beyond), max(beyond)))
    words = f"triangles: {len(far)} off the scale, {' to '.join(ends)}"
    drawn["layout"]["meta"]["key"].append({"name": words.replace("-", "−"), "colour": INK, "dash": "none"})
    return drawn


def bars(x: Sequence[Any], y: Sequence[Number], hover: str) -> Figure:
    """Bars that stand, in the colour of their sign."""
    place = {"type": "bar", "x": list(x), "y": list(y), "showlegend": False}
    return {**place, "marker": {"color": signed(y)}, "hovertemplate": f"{hover}<extra></extra>"}


def across(
    names: Sequence[str],
    values: Sequence[float],
    words: str,
    *,
    colours: Sequence[str] | None = None,
    error: Mapping[str, Any] | None = None,
) -> Figure:
    """Bars that lie, one below the other, so that long names fit."""
    lying: Figure = {"type": "bar", "orientation": "h", "x": list(values), "y": [named(n) for n in names]}
    lying |= {"marker": {"color": list(colours or signed(values))}, "hovertemplate": "%{y}: %{x:+.3g}<extra></extra>"}
    lying |= {"error_x": dict(error)} if error else {}
    drawn = figure([lying], words, "", height=110 + 32 * len(names), items=list(names))
    drawn["layout"]["yaxis"] |= {"autorange": "reversed", "showgrid": False, "type": "category"}
    drawn["layout"]["xaxis"]["nticks"] = 5  # long names leave little room on a phone
    return drawn


def signed(values: Sequence[Number]) -> list[str]:
    """The colour of each sign."""
    return [HURT if (x or 0) < 0 else HELPED for x in values]


def named(text: str, longest: int = LONGEST) -> str:
    """A name beside a figure: short, and with no markup that Plotly would take for its own."""
    return html.escape(text if len(text) <= longest else text[: longest - 1] + "…", quote=False)


def _axis(name: str) -> Figure:
    look = {"gridcolor": LINE, "zerolinecolor": MUTED, "linecolor": LINE, "tickcolor": LINE, "automargin": True}
    return {"title": {"text": name, "standoff": 10}, "exponentformat": "power", "fixedrange": True, **look}


def _mean(values: Sequence[Number]) -> Number:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else None
