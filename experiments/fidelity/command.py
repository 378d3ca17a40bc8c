"""`python -m experiments fidelity`: its options, its tables on the terminal and as Markdown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments import tables
from experiments.cli import Cache, Json, Markdown, Methods, Samples, Seeds, app, begin, finish, names_of, seeds_of

KINDS = ("single", "all")
ABOUT = ("projection", "curvature", "optimizer_model")
AGAINST = "_against_paper"


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
    from experiments.data.images import setup_of
    from experiments.fidelity.page import page
    from experiments.fidelity.study import study

    begin(scatter, markdown)
    setup = setup_of(model, activation, optimizer, epochs, images)
    with output.progress() as say:
        outcome = study(setup, seeds_of(seeds), count=removals, only=names_of(methods), cache=cache, say=say)
    if scatter is not None:
        scatter.write_text(page(outcome), encoding="utf-8")
    title = f"{model}, {activation}, {optimizer}"
    finish(outcome.as_dict(), lambda result: print_tables(title, result), json=json, files={markdown: as_markdown})


def print_tables(setup: str, result: Mapping[str, Any]) -> None:
    """Correlations, differences, and last the cost: the one table whose seconds differ from time to time."""
    top, rows = result["ceiling"], result["rows"]
    title = (
        f"{setup}: Spearman with retraining, mean of {len(result['seeds'])} seeds and its 95 % bootstrap interval, "
        f"{result['removals']} removals each"
    )
    lines = [("exact unrolling (ceiling)", "full", "Hessian", result["setup"]["optimizer"], *_means(top))]
    lines += [(r["method"], *(r[k] for k in ABOUT), *_means(r)) for r in rows]
    output.table(title, ("method", "projection", "curvature", "optimizer", *KINDS), lines)
    against = [
        (r["method"], "paper", *(tables.signed(r[kind + AGAINST]) for kind in KINDS))
        for r in rows
        if KINDS[0] + AGAINST in r
    ]
    against += [(c["method"], c["against"], *(tables.signed(c[kind]) for kind in KINDS)) for c in result["contrasts"]]
    if against:
        output.table("Differences and their 95 % paired bootstrap intervals", ("method", "minus", *KINDS), against)
    cost = [(r["method"], f"{r['seconds']:.1f}", f"{r['store_bytes'] / 1e6:.1f}") for r in rows]
    output.table("Cost, mean of the seeds", ("method", "seconds", "MB"), cost)
    tables.left_out(result["skipped"])


def _means(row: Mapping[str, Any]) -> list[str]:
    return [tables.bounded(row[kind], row[f"{kind}_interval"]) for kind in KINDS]


def as_markdown(result: Mapping[str, Any]) -> str:
    """Three tables: means with differences to the paper's method, other differences, and every seed."""
    top, rows = result["ceiling"], result["rows"]
    columns = ("method", "projection", "curvature", "optimizer", *KINDS, *(f"{k} − paper" for k in KINDS), "s", "store")
    best = ("exact unrolling: **ceiling**", "full", "Hessian", "–", *(f"{top[k]:.3f}" for k in KINDS), *"––––")
    parts = [tables.markdown(columns, [best, *map(_line, rows)])]
    if result["contrasts"]:
        lines = [
            (f"`{c['method']}` − `{c['against']}`", *(tables.signed(c[k]) for k in KINDS)) for c in result["contrasts"]
        ]
        parts.append(tables.markdown(("difference", *KINDS), lines))
    parts.append(f"Each seed ({', '.join(map(str, result['seeds']))}):")
    each = [
        (r["method"], *(tables.each(r[f"{k}_seeds"]) for k in KINDS)) for r in ({"method": "ceiling", **top}, *rows)
    ]
    parts.append(tables.markdown(("method", *KINDS), each))
    if result["skipped"]:
        parts.append("Left out: " + "; ".join(result["skipped"]) + ".")
    return "\n\n".join(parts) + "\n"


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    against = [tables.signed(row.get(kind + AGAINST)) for kind in KINDS]
    means = [f"{row[kind]:.3f}" for kind in KINDS]
    cost = f"{row['seconds']:.1f}", tables.size(row["store_bytes"])
    return f"`{row['method']}`", *(row[k] for k in ABOUT), *means, *against, *cost
