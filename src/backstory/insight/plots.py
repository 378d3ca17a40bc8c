"""Plotly figures and pages that need no network."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UnsupportedError

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5fd3", "#c77d0a", "#2a9d8f", "#6c757d", "#b5179e")
HEIGHT = 360  # pixels of one plot


def figure(titles: Sequence[str], x: str, y: Sequence[str], *, shared: bool = True) -> Any:
    """Plots below each other, one for each title; with `shared`, over the same x."""
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise UnsupportedError("a figure needs the package 'plotly': pip install 'backstory[plot]'.") from error
    n = len(titles)
    made = make_subplots(
        rows=n, cols=1, shared_xaxes=shared, subplot_titles=list(titles), vertical_spacing=0.3 / n if n > 1 else 0.0
    )
    for row, name in enumerate(y, 1):
        made.update_yaxes(title_text=name, exponentformat="power", row=row, col=1)
    made.update_xaxes(title_text=x, row=n, col=1)
    made.update_layout(template="plotly_white", height=HEIGHT * n + 120)
    return made


def page(title: str, words: str, *figures: Any) -> str:
    """One HTML file with the figures and Plotly's script in it."""
    drawn = [f.to_html(full_html=False, include_plotlyjs=k == 0) for k, f in enumerate(figures)]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>
<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem">
<h1 style="font-size: 1.4rem">{html.escape(title)}</h1>
<p>{html.escape(words)}</p>
{"".join(drawn)}
</body></html>
"""


def frame(columns: Mapping[str, Any]) -> Any:
    """A pandas DataFrame."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UnsupportedError("to_pandas() needs the package 'pandas': pip install 'backstory[pandas]'.") from error
    return pd.DataFrame(columns)
