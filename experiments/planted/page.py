"""The page of the study of planted data: the AUROC of every method, with its interval and each seed."""

from collections.abc import Mapping
from typing import Any

from backstory.results.figures import page as html_page
from experiments import plots

WORDS = """How often a planted sample is more suspect than a clean one: 1 finds all of them first, 0.5 is chance. Bars: 95 % intervals of the mean over
seeds; red strokes: each seed."""


def page(result: Mapping[str, Any]) -> str:
    """One HTML file."""
    title = f"Finding planted data: {result['kind']}, {result['share']:.0%} of the samples"
    return html_page(title, WORDS, figure(result))


def figure(result: Mapping[str, Any]) -> Any:
    """One line for each method, the best on top."""
    rows = result["rows"]
    drawn = plots.figure(("Finding planted data",), "AUROC", ("",))
    names = [_name(row) for row in rows]
    bars = {"type": "data", "symmetric": False, "array": [r["upper"] - r["auroc"] for r in rows]}
    bars["arrayminus"] = [r["auroc"] - r["lower"] for r in rows]
    each = [(x, name) for row, name in zip(rows, names, strict=True) for x in row["seeds"]]
    drawn.add_scatter(
        x=[r["auroc"] for r in rows], y=names, error_x=bars, mode="markers", name="mean",
        marker={"color": plots.COLOURS[0], "size": 10}, row=1, col=1,
    )  # fmt: skip
    drawn.add_scatter(
        x=[x for x, _ in each], y=[name for _, name in each], mode="markers", name="each seed",
        marker={"color": plots.COLOURS[1], "size": 14, "symbol": "line-ns-open", "line": {"width": 2}}, row=1, col=1,
    )  # fmt: skip
    drawn.add_vline(x=0.5, line_dash="dot", row=1, col=1)
    drawn.update_yaxes(autorange="reversed", row=1, col=1)
    drawn.update_layout(height=120 + 40 * len(rows))
    return drawn


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['method']} ({row['chosen']})" if "chosen" in row else str(row["method"])
