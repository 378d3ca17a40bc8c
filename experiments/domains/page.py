"""The page of the study of sources: the matrices of the first seed, and every cell of all seeds against the truth."""

from collections.abc import Mapping
from typing import Any

from backstory.results.figures import page as html_page
from experiments import plots

DRAWN = ("default", "exact", "tracin", "paper")  # rows, where they are there
WORDS = """Each cell of a matrix is what leaving out a source does to the mean loss of a domain: blue, the source helped; red, it hurt. Each matrix has
its own scale of colours, which ends at the largest cell beside the diagonal: a source matters most for its own domain. Below, every cell of all seeds: retraining across, the score upward, divided by the largest score of its method."""


def page(result: Mapping[str, Any]) -> str:
    """One HTML file."""
    drawn = [name for name in DRAWN if name in result["matrices"][0]]
    title = f"What each source is worth for each domain: GPT, {result['setup']['mode']}"
    return html_page(title, WORDS, matrices(result, ["truth", *drawn]), scatter(result, drawn))


def matrices(result: Mapping[str, Any], names: list[str]) -> Any:
    """Heat maps below each other, whole sources, first seed."""
    drawn = plots.figure([_title(n) for n in names], "domain of the queries", ["source"] * len(names), shared=False)
    for row, name in enumerate(names, 1):
        z = result["matrices"][0][name]["whole"]
        reach = max(abs(x) for i, line in enumerate(z) for j, x in enumerate(line) if i != j) or 1.0
        low, high = drawn.layout["yaxis" if row == 1 else f"yaxis{row}"].domain
        bar = {"len": high - low, "y": (low + high) / 2, "exponentformat": "power"}
        drawn.add_heatmap(
            z=z, x=result["domains"], y=result["domains"], zmin=-reach, zmax=reach, colorscale="RdBu", colorbar=bar,
            row=row, col=1,
        )  # fmt: skip
        drawn.update_yaxes(autorange="reversed", row=row, col=1)
    return drawn


def scatter(result: Mapping[str, Any], names: list[str]) -> Any:
    """Scores against the truth, whole sources, all seeds."""
    drawn = plots.figure(("Every cell of all seeds",), "truth: change of the loss", ("score, of its largest",))
    for colour, name in zip(plots.COLOURS, names, strict=False):
        points = [pair for seed in result["matrices"] for pair in _cells(seed, name)]
        largest = max(abs(score) for _, score in points) or 1.0
        drawn.add_scatter(
            x=[truth for truth, _ in points], y=[score / largest for _, score in points], mode="markers", name=name,
            marker={"color": colour, "size": 6, "opacity": 0.7}, row=1, col=1,
        )  # fmt: skip
    return drawn


def _cells(seed: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    truth, scores = ([x for line in seed[n]["whole"] for x in line] for n in ("truth", name))
    return list(zip(truth, scores, strict=True))


def _title(name: str) -> str:
    return "truth: retraining without the source" if name == "truth" else name
