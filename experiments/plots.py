"""Plotly figures of the experiments' pages: plots below each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backstory.errors import UnsupportedError

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5fd3", "#c77d0a", "#2a9d8f", "#6c757d", "#b5179e")
HEIGHT = 360  # pixels of one plot


def figure(titles: Sequence[str], x: str, y: Sequence[str], *, shared: bool = True) -> Any:
    """Plots below each other, one for each title; with `shared`, over the same x."""
    try:
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise UnsupportedError("a figure needs the package 'plotly': pip install '.[plot]' in the checkout.") from error
    n = len(titles)
    made = make_subplots(
        rows=n, cols=1, shared_xaxes=shared, subplot_titles=list(titles), vertical_spacing=0.3 / n if n > 1 else 0.0
    )
    for row, name in enumerate(y, 1):
        made.update_yaxes(title_text=name, exponentformat="power", row=row, col=1)
    made.update_xaxes(title_text=x, row=n, col=1)
    made.update_layout(template="plotly_white", height=HEIGHT * n + 120)
    return made


def smooth(y: NDArray[np.float64], share: float = 0.02) -> NDArray[np.float64]:
    """Mean over the neighbours within `share` of the curve on either side; what is not a number is left out."""
    half = min(max(1, round(share * len(y))), (len(y) - 1) // 2)
    known = np.isfinite(y)
    window = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, y, 0.0), window, "same")
    count = np.convolve(known.astype(float), window, "same")
    out: NDArray[np.float64] = np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0)
    return out
