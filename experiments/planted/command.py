"""`python -m experiments planted`: bad data planted in a run, and how well each method finds it."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments import tables
from experiments.cli import Json, Mode, Plot, Seeds, app, begin, finish, seeds_of

Images = Annotated[int, typer.Option(help="Training images, for --kind labels.", min=2)]


@app.command()
def planted(
    kind: Annotated[
        str,
        typer.Option(help="shuffled, uniform, reversed or repeated passages of text; labels: wrong ones on images."),
    ] = "shuffled",
    share: Annotated[float | None, typer.Option(help="Of the samples; without it 0.05 of text, 0.1 of labels.")] = None,
    mode: Mode = "finetune",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adamw, for --kind labels.")] = "sgd",
    model: Annotated[str, typer.Option(help="mlp or tiny, for --kind labels.")] = "mlp",
    epochs: Annotated[int, typer.Option(help="For --kind labels.", min=1)] = 5,
    images: Images = 2000,
    seeds: Seeds = "0-2",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """How well each method finds spoiled passages or wrong labels, by their influence on clean queries."""
    from experiments.data.images import setup_of
    from experiments.data.texts import setup_named
    from experiments.planted.page import page
    from experiments.planted.study import study

    begin(plot)
    labels = kind == "labels"
    setup = setup_of(model, "gelu", optimizer, epochs, images) if labels else setup_named(mode)
    part = (0.1 if labels else 0.05) if share is None else share
    with output.progress() as say:
        result = study(setup, kind, seeds_of(seeds), share=part, say=say)
    finish(result, print_table, json=json, files={plot: page})


def print_table(result: Mapping[str, Any]) -> None:
    """One line for each method, the best first."""
    title = (
        f"{result['kind']}: {result['planted'][0]} of {result['samples'][0]:,} samples; finding them, mean of "
        f"{len(result['seeds'])} seeds and its 95 % interval"
    )
    columns = ("method", "AUROC", "each seed", "precision", "planted predicted to hurt", "clean predicted to hurt")
    output.table(title, columns, [_line(row) for row in result["rows"]])
    change = tables.each(result["change"], "+.4f")
    output.out.print(f"Retraining without all of them changes the clean queries' loss by {change}.", soft_wrap=True)
    tables.left_out(result["failed"])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{row['method']} ({row['chosen']})" if "chosen" in row else str(row["method"])
    hurt = [tables.number(row.get(key), ".0%") for key in ("hurt_planted", "hurt_clean")]
    return name, tables.bounded(row["auroc"], row), tables.each(row["seeds"], ".3f"), f"{row['precision']:.2f}", *hurt
