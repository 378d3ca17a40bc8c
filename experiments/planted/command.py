"""`python -m experiments planted`: bad data planted in a run, and how well each method finds it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Json, Mode, Seeds, app, seeds_of

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
    plot: Annotated[Path | None, typer.Option(help="Write a page with the figure, such as planted.html.")] = None,
    json: Json = False,
) -> None:
    """How well each method finds spoiled passages or wrong labels, by their influence on clean queries."""
    import torch

    from experiments.data.images import setup_of
    from experiments.data.texts import setup_named
    from experiments.planted.page import page
    from experiments.planted.study import study as run

    output.plotting(plot)
    torch.set_num_threads(1)
    labels = kind == "labels"
    setup = setup_of(model, "gelu", optimizer, epochs, images) if labels else setup_named(mode)
    part = (0.1 if labels else 0.05) if share is None else share
    with output.progress() as say:
        found = run(setup, kind, seeds_of(seeds), share=part, say=say)
    if plot is not None:
        plot.write_text(page(found), encoding="utf-8")
    if json:
        output.emit(found)
    else:
        _table(found)


def _table(found: Mapping[str, Any]) -> None:
    title = (
        f"{found['kind']}: {found['planted'][0]} of {found['samples'][0]:,} samples; finding them, mean of {len(found['seeds'])} seeds "
        "and its 95 % interval"
    )
    columns = ("method", "AUROC", "each seed", "precision", "planted said to hurt", "clean said to hurt")
    output.table(title, columns, [_line(row) for row in found["rows"]])
    change = " ".join(f"{x:+.4f}" for x in found["change"])
    output.out.print(f"Retraining without all of them changes the clean queries' loss by {change}.", soft_wrap=True)


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{row['method']} ({row['chosen']})" if "chosen" in row else str(row["method"])
    score = f"{row['auroc']:.3f} [{row['lower']:.3f}, {row['upper']:.3f}]"
    hurt = [f"{row[k]:.0%}" if k in row else "–" for k in ("hurt_planted", "hurt_clean")]
    return name, score, " ".join(f"{x:.3f}" for x in row["seeds"]), f"{row['precision']:.2f}", *hurt
