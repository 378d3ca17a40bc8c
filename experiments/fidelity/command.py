"""`python -m experiments`: the paper's experiments and ours, as commands."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Cache, Json, Markdown, Methods, Samples, Seeds, app, names_of, seeds_of

KINDS = ("single", "all")
AGAINST = "single_against_paper"


@app.command()
def fidelity(
    model: Annotated[str, typer.Option(help="mlp, cnn or tiny.")] = "mlp",
    epochs: Annotated[int | None, typer.Option(help="Without it: 10 for cnn, else 3 (tiny: 1).", min=1)] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw.")] = "sgd",
    activation: Annotated[
        str, typer.Option(help="relu: the paper's net; gelu: a smooth one, smaller as mlp.")
    ] = "relu",
    seeds: Seeds = "0-4",
    removals: Samples = 100,
    methods: Methods = None,
    images: Annotated[int | None, typer.Option(help="Train on fewer images than the set-up says.", min=2)] = None,
    cache: Cache = None,
    scatter: Annotated[Path | None, typer.Option(help="Write a page with every method's scores against truth.")] = None,
    markdown: Markdown = None,
    json: Json = False,
) -> None:
    """Rank correlation of every method's scores with retraining, and the ceiling."""
    import torch

    from experiments.data.images import setup_of
    from experiments.fidelity.page import page
    from experiments.fidelity.study import study
    from experiments.fidelity.text import markdown as as_markdown

    output.plotting(scatter)
    output.writable(markdown)
    torch.set_num_threads(1)
    setup = setup_of(model, activation, optimizer, epochs, images)
    with output.progress() as say:
        outcome = study(setup, seeds_of(seeds), count=removals, only=names_of(methods), cache=cache, say=say)
    if scatter is not None:
        scatter.write_text(page(outcome), encoding="utf-8")
    if markdown is not None:
        markdown.write_text(as_markdown(outcome.as_dict()), encoding="utf-8")
    if json:
        output.emit(outcome.as_dict())
    else:
        _table(f"{model}, {activation}, {optimizer}", outcome.as_dict())


def _table(setup: str, found: Mapping[str, Any]) -> None:
    """Correlations, differences, and last the cost: the one table whose seconds differ from time to time."""
    top, rows = found["ceiling"], found["rows"]
    title = (
        f"{setup}: Spearman with retraining, mean of {len(found['seeds'])} seeds and its 95 % bootstrap interval, "
        f"{found['removals']} removals each"
    )
    lines = [("exact unrolling (ceiling)", "full", "Hessian", found["setup"]["optimizer"], *_means(top))]
    lines += [(*(r[k] for k in ("method", "projection", "curvature", "optimizer_model")), *_means(r)) for r in rows]
    output.table(title, ("method", "projection", "curvature", "optimizer", *KINDS), lines)
    against = [
        (r["method"], "paper", *(_interval(r[f"{k}_against_paper"]) for k in KINDS)) for r in rows if AGAINST in r
    ]
    against += [(c["method"], c["against"], *(_interval(c[k]) for k in KINDS)) for c in found["contrasts"]]
    if against:
        output.table("Differences and their 95 % paired bootstrap intervals", ("method", "minus", *KINDS), against)
    cost = [(r["method"], f"{r['seconds']:.1f}", f"{r['store_bytes'] / 1e6:.1f}") for r in rows]
    output.table("Cost, mean of the seeds", ("method", "seconds", "MB"), cost)
    for line in found["skipped"]:
        output.out.print(f"left out: {line}", soft_wrap=True)


def _means(row: Mapping[str, Any]) -> list[str]:
    """Single and all, each with its interval."""
    bounds = [row[f"{kind}_interval"] for kind in KINDS]
    return [f"{row[k]:.3f} [{b['lower']:.3f}, {b['upper']:.3f}]" for k, b in zip(KINDS, bounds, strict=True)]


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['lower']:+.3f}, {value['upper']:+.3f}]"
