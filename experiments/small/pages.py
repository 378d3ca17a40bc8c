"""The pages of the small studies: one HTML file each that needs no network."""

from collections.abc import Mapping
from typing import Any

from backstory.results.figures import page as html_page
from experiments.plots import COLOURS

SYMBOLS = ("circle", "square", "diamond", "cross")
Found = Mapping[str, Any]


def limit_page(result: Found) -> str:
    """Ratio against the number of steps, with standard errors."""
    figure = _figure("steps T", "T × expected TSLOO / influence function")
    for colour, curve in zip(COLOURS, result["curves"], strict=False):
        points = curve["points"]
        figure.add_scatter(
            x=[p["steps"] for p in points],
            y=[p["ratio"] for p in points],
            error_y={"type": "data", "array": [p["error"] for p in points]},
            name=curve["model"],
            line={"color": colour},
        )
    figure.add_hline(y=1, line_dash="dot")
    figure.update_xaxes(type="log")
    return html_page("The influence function as the limit of long training", LIMIT, figure)


def kinks_page(result: Found) -> str:
    """Gap against the share of the weight that is removed; each seed a thin line."""
    figure = _figure("share f of the weight that is removed", "gap between truth(f) and exact unrolling, of ‖truth(1)‖")
    for colour, row in zip(COLOURS, result["rows"], strict=False):
        name = f"{row['activation']}, {row['kind']}"
        for gaps in row["gaps_seeds"]:
            thin = {"color": colour, "width": 1}
            figure.add_scatter(x=row["factors"], y=gaps, line=thin, opacity=0.4, legendgroup=name, showlegend=False)
        figure.add_scatter(x=row["factors"], y=row["gaps"], name=name, line={"color": colour}, legendgroup=name)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return html_page("What kinks cost exact unrolling", KINKS, figure)


def bound_page(result: Found) -> str:
    """Errors and bounds of each removal against the step of the removal."""
    figure = _figure("step of the removed occurrence", "error of the loss, and its bound")
    steps = [row["step"] for row in result["rows"]]
    for colour, name in zip(COLOURS, ("hessian", "ggn", "empirical"), strict=False):
        for kind, symbol in (("error", "circle"), ("bound", "line-ew-open")):
            marker = {"color": colour, "symbol": symbol, "size": 8}
            values = [row[name][kind] for row in result["rows"]]
            figure.add_scatter(x=steps, y=values, mode="markers", marker=marker, name=f"{name}: {kind}")
    truth = [abs(row["truth"]) for row in result["rows"]]
    figure.add_scatter(x=steps, y=truth, mode="markers", name="|truth|", marker={"color": "#6c757d", "symbol": "x"})
    figure.update_yaxes(type="log", exponentformat="power")
    words = f"{BOUND} The theorem's own number, a distance of weights, is {result['constants']['theorem']:.2g}."
    return html_page("The paper's error bound, with measured constants", words, figure)


def duplicates_page(result: Found) -> str:
    """Truth across, a method's value upward, early and late copies in two colours: one plot for each method."""
    from plotly.subplots import make_subplots

    names = [row["method"] for row in result["rows"]]
    figure = make_subplots(rows=len(names), cols=1, subplot_titles=names, vertical_spacing=0.06)
    for place, name in enumerate(names, 1):
        for colour, when in zip(COLOURS, ("early", "late"), strict=False):
            truth = [x for seed in result["values"] for x in seed["truth"][when]]
            values = [x for seed in result["values"] for x in seed[name][when]]
            figure.add_scatter(
                x=truth, y=values, mode="markers", marker={"color": colour}, name=f"{when} copies", legendgroup=when,
                showlegend=place == 1, row=place, col=1,
            )  # fmt: skip
    figure.update_xaxes(title_text="loss retrained without the copy − with it")
    figure.update_yaxes(title_text="value")
    figure.update_layout(template="plotly_white", height=330 * len(names))
    return html_page("Copies of one sample, early and late", DUPLICATES, figure)


def ablation_page(result: Found) -> str:
    """Correlation with retraining against the bytes of an occurrence."""
    figure = _figure("bytes of an occurrence on disk", "Spearman with retraining, removal from the last epoch")
    rows = result["rows"]
    curvatures = list(dict.fromkeys(row["curvature"] for row in rows))
    for colour, projection in zip(COLOURS, dict.fromkeys(row["projection"] for row in rows), strict=False):
        chosen = [row for row in rows if row["projection"] == projection]
        symbols = [SYMBOLS[curvatures.index(row["curvature"]) % len(SYMBOLS)] for row in chosen]
        figure.add_scatter(
            x=[row["bytes"] for row in chosen],
            y=[row["single"] for row in chosen],
            mode="markers",
            name=projection,
            marker={"color": colour, "symbol": symbols, "size": 9},
            text=[
                f"rank {r['rank']}, {r['curvature']}{', warm-up ' + r['warmup'] if r['warmup'] else ''}" for r in chosen
            ],
        )
    figure.update_xaxes(type="log")
    shapes = ", ".join(f"{c}: {SYMBOLS[k % len(SYMBOLS)]}" for k, c in enumerate(curvatures))
    return html_page("What a record must keep", f"{ABLATION} Shapes: {shapes}.", figure)


LIMIT = """On a convex model with a constant rate, T times the effect of one sample that is added to one of T batches, averaged
over the batches, tends to the influence function. Bars are standard errors over the seeds."""
KINKS = """A removal takes a share f of a sample's weight, and the change is divided by f. Where training is smooth in the weights
the gap shrinks with f; where it crosses kinks of ReLU it does not. Thin lines are single seeds."""
BOUND = """One removed occurrence to a place. Circles: how far an estimate is from retraining. Strokes: the bound of that error by
the proof's chain of inequalities, with every constant measured along the run. Hessian is exact unrolling; ggn and
empirical are embeddings."""
DUPLICATES = """Each sample has one copy early and one copy late in training. Methods that see only the trained model give both
copies one value: their two colours lie at the same heights."""
ABLATION = """Each point is one way to record the same run. Hover for rank and curvature."""


def _figure(x: str, y: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure()
    figure.update_layout(template="plotly_white", height=560, xaxis_title=x, yaxis_title=y)
    return figure
