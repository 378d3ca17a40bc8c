"""What all figures are drawn with: lines and bars on two axes, as Plotly's own JSON, in colours that the style sheet names.

A colour such as "var(--helped)" is put in by the page, so that one description serves light and dark. Curves of more than
`POINTS` steps are drawn as means over equal parts, so that a page stays small however long the run was.
"""

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .schemas import Number

Figure = dict[str, Any]
POINTS, BARS = 1000, 160
INK, MUTED, LINE, SURFACE = "var(--ink)", "var(--muted)", "var(--line)", "var(--surface)"
HELPED, HURT, ACCENT, WARM, PLAIN = "var(--helped)", "var(--hurt)", "var(--accent)", "var(--warm)", "var(--plain)"
WINDOWED = 3  # times the reach of all values but the farthest: beyond it an axis hides the rest
CLEAR = "rgba(0,0,0,0)"
LONGEST = 28  # letters of a name beside a figure


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
    """Traces on two named axes. `meta` goes to the page: a key to the colours, links of the bars."""
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
    said: str = "+.3g",
) -> Figure:
    """One curve."""
    look = {"line": {"color": colour, "width": width, "dash": dash}, "opacity": opacity}
    hover = f"{name}, step %{{x}}: %{{y:{said}}}<extra></extra>"
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "name": name,
        "hovertemplate": hover,
        **look,
    }


def bounded(drawn: Figure, share: float = 0.01) -> Figure:
    """The figure with an axis that a few far values do not window; a triangle at its edge stands for each of them."""
    values = sorted(y for t in drawn["data"] for y in t["y"] if y is not None)
    if not values:
        return drawn
    cut = int(share * len(values))
    low, high = min(0.0, values[cut]), max(0.0, values[-1 - cut])
    if high <= low or max(0.0, values[-1]) - min(0.0, values[0]) <= WINDOWED * (high - low):
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
    said = "beyond the edge, step %{x}: %{customdata:+.3g}<extra></extra>"
    look = {"type": "scatter", "mode": "markers", "name": "beyond the edge", "marker": marks, "hovertemplate": said}
    drawn["layout"]["xaxis"]["range"] = [drawn["data"][0]["x"][0], drawn["data"][0]["x"][-1]]
    drawn["data"].append({**look, **place, "cliponaxis": False})
    ends = dict.fromkeys(f"{y:+.2g}" for y in (min(beyond), max(beyond)))
    words = f"triangles: {len(far)} beyond the edge, {' to '.join(ends)}"
    drawn["layout"]["meta"]["key"].append({"name": words.replace("-", "−"), "colour": INK, "dash": "none"})
    return drawn


def bars(x: Sequence[Any], y: Sequence[Number], said: str) -> Figure:
    """Bars that stand, in the colour of their sign."""
    return {
        "type": "bar",
        "x": list(x),
        "y": list(y),
        "marker": {"color": signed(y)},
        "hovertemplate": f"{said}<extra></extra>",
    }


def across(
    names: Sequence[str],
    values: Sequence[float],
    words: str,
    links: Sequence[str],
    *,
    colours: Sequence[str] | None = None,
    error: Mapping[str, Any] | None = None,
) -> Figure:
    """Bars that lie, one below the other, so that long names fit; a click leads to the link of the bar."""
    lying: Figure = {"type": "bar", "orientation": "h", "x": list(values), "y": [named(n) for n in names]}
    lying |= {"marker": {"color": list(colours or signed(values))}, "hovertemplate": "%{y}: %{x:+.3g}<extra></extra>"}
    lying |= {"error_x": dict(error)} if error else {}
    drawn = figure([lying], words, "", height=110 + 32 * len(names), links=list(links))
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
