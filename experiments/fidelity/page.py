"""The scatter page of the fidelity study: one small plot for each method and removal, truth across, score upward.

One HTML file that needs no network; one colour for each seed, the ceiling first.
"""

from typing import Any

from backstory.results.figures import page as html_page
from experiments import plots
from experiments.fidelity.methods import KINDS
from experiments.fidelity.study import Outcome
from experiments.harness import CEILING
from experiments.statistics import agreement, mean

HEIGHT = 260  # pixels of one row of plots
WORDS = """Across: how much the mean loss of the queries changes when a training image is left out and the net is trained again.
Upward: what the method predicts, in its own units. One point is one image, one colour is one seed.
Left (single): left out of the last epoch; right (all): left out of all epochs. The number is the mean over the seeds of
Spearman's rank correlation."""


def page(outcome: Outcome) -> str:
    """The whole page as text."""
    setup = outcome.setup
    title = f"{setup.net}, {setup.activation}, {setup.optimizer}, {setup.epochs} epochs"
    return html_page(f"Scores against retraining: {title}", WORDS, figure(outcome))


def figure(outcome: Outcome) -> Any:
    """A row of plots for the ceiling and for each method."""
    from plotly.subplots import make_subplots

    names = [CEILING, *(m.name for m in outcome.methods)]
    drawn = make_subplots(
        rows=len(names),
        cols=len(KINDS),
        subplot_titles=[_title(outcome, name, kind) for name in names for kind in KINDS],
        vertical_spacing=80 / (HEIGHT * len(names)),
    )
    for row, name in enumerate(names, 1):
        for column, kind in enumerate(KINDS, 1):
            _plot(drawn, outcome, name, kind, row, column)
    drawn.update_layout(template="plotly_white", height=HEIGHT * len(names) + 120)
    return drawn


def _title(outcome: Outcome, name: str, kind: str) -> str:
    each = [agreement(*seed.points(name, kind)) for seed in outcome.seeds]
    return f"{'exact unrolling (ceiling)' if name == CEILING else name}: {kind}, {mean(each):.3f}"


def _plot(drawn: Any, outcome: Outcome, name: str, kind: str, row: int, column: int) -> None:
    for k, (number, seed) in enumerate(zip(outcome.numbers, outcome.seeds, strict=True)):
        scores, truth = seed.points(name, kind)
        drawn.add_scatter(
            x=truth.flatten().tolist(),
            y=scores.flatten().tolist(),
            mode="markers",
            marker={"size": 4, "color": plots.COLOURS[k % len(plots.COLOURS)]},
            name=f"seed {number}",
            legendgroup=str(number),
            showlegend=(row, column) == (1, 1),
            row=row,
            col=column,
        )
    drawn.update_xaxes(title_text="truth", title_standoff=2, row=row, col=column)
    drawn.update_yaxes(title_text="score", exponentformat="e", row=row, col=column)
