"""`python -m experiments recordings`: recordings of classifiers beside exact derivatives."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Json, Methods, Seeds, app, begin, finish, names_of, seeds_of

COLUMNS = ("recording", "curvature", "single", "each seed", "all", "each seed", "CPU ×", "passes a step", "MB")


@app.command()
def recordings(
    model: Annotated[str, typer.Option(help="mlp, cnn or tiny.")] = "cnn",
    activation: Annotated[str, typer.Option(help="relu or gelu.")] = "relu",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw.")] = "sgd",
    epochs: Annotated[int | None, typer.Option(help="Without it: 10 for cnn, else 3 (tiny: 1).", min=1)] = None,
    seeds: Seeds = "10-12",
    methods: Methods = None,
    json: Json = False,
) -> None:
    """Rank correlation of recordings with exact derivatives, and their cost; nothing is retrained."""
    from experiments.data.images import setup_of
    from experiments.recordings.study import study

    begin()
    with output.progress() as say:
        result = study(setup_of(model, activation, optimizer, epochs), seeds_of(seeds), only=names_of(methods), say=say)
    finish(result, print_tables, json=json)


def print_tables(result: Mapping[str, Any]) -> None:
    """The table on a terminal."""
    rows = [
        (
            r["recording"], r["curvature"], f"{r['single']:.2f}", _each(r["single_seeds"]), f"{r['all']:.2f}", _each(r["all_seeds"]),
            f"{r['cpu_ratio']:.2f}", f"{r['passes']:.2f}", f"{r['store_bytes'] / 1e6:.1f}",
        )
        for r in result["rows"]
    ]  # fmt: skip
    output.table(f"Recordings beside exact derivatives, seeds {result['seeds']}", COLUMNS, rows)


def _each(values: list[float]) -> str:
    return " ".join(f"{x:.2f}" for x in values)
