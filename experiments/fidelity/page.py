"""The scatter page of the fidelity study: one small plot for each method and removal, truth across, score upward.

One HTML file that needs no network; one colour for each seed, the ceiling first.
"""

import html
from typing import Any

from experiments.fidelity.study import KINDS, Outcome

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5fd3", "#c77d0a", "#2a9d8f", "#6c757d", "#b5179e")
HEIGHT = 260  # pixels of one row of plots


def page(outcome: Outcome) -> str:
    """The whole page as text."""
    setup = outcome.setup
    title = f"{setup.net}, {setup.activation}, {setup.optimizer}, {setup.epochs} epochs"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Fidelity: {html.escape(title)}</title></head>
<body style="font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem">
<h1 style="font-size: 1.4rem">Scores against retraining: {html.escape(title)}</h1>
<p>Across: how much the mean loss of the queries changes when a training image is left out and the net is trained again.
Upward: what the method predicts, in its own units. One point is one image, one colour is one seed.
Left (single): left out of the last epoch; right (all): left out of all epochs. The number is the mean over the seeds of
Spearman's rank correlation.</p>
{_figure(outcome).to_html(full_html=False, include_plotlyjs=True)}
</body></html>
"""


def _figure(outcome: Outcome) -> Any:
    from plotly.subplots import make_subplots

    names = [None, *(m.name for m in outcome.methods)]
    figure = make_subplots(
        rows=len(names),
        cols=len(KINDS),
        subplot_titles=[_title(outcome, name, kind) for name in names for kind in KINDS],
        vertical_spacing=80 / (HEIGHT * len(names)),
    )
    for row, name in enumerate(names, 1):
        for column, kind in enumerate(KINDS, 1):
            _plot(figure, outcome, name, kind, row, column)
    figure.update_layout(template="plotly_white", height=HEIGHT * len(names) + 120)
    return figure


def _title(outcome: Outcome, name: str | None, kind: str) -> str:
    mean = sum(seed.spearman(name, kind) for seed in outcome.found) / len(outcome.found)
    return f"{name or 'exact unrolling (ceiling)'}: {kind}, {mean:.3f}"


def _plot(figure: Any, outcome: Outcome, name: str | None, kind: str, row: int, column: int) -> None:
    for k, (number, seed) in enumerate(zip(outcome.seeds, outcome.found, strict=True)):
        scores, truth = seed.points(name, kind)
        figure.add_scatter(
            x=truth.tolist(),
            y=scores.tolist(),
            mode="markers",
            marker={"size": 4, "color": COLOURS[k % len(COLOURS)]},
            name=f"seed {number}",
            legendgroup=str(number),
            showlegend=(row, column) == (1, 1),
            row=row,
            col=column,
        )
    figure.update_xaxes(title_text="truth", title_standoff=2, row=row, col=column)
    figure.update_yaxes(title_text="score", exponentformat="e", row=row, col=column)
