"""`python -m experiments limit, kinks, bound, duplicates, ablation`: one question each, in minutes."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Cache, Json, Samples, Seeds, app, seeds_of
from experiments.small import tables as tables

Plot = Annotated[Path | None, typer.Option(help="Write a page with the figure, such as limit.html.")]
Images = Annotated[int, typer.Option(help="Training images.", min=2)]
Epochs = Annotated[int, typer.Option(min=1)]
Model = Annotated[str, typer.Option(help="mlp or tiny.")]


@app.command()
def limit(
    models: Annotated[str, typer.Option(help="linear, logistic.")] = "linear,logistic",
    steps: Annotated[str, typer.Option(help="Numbers of training steps T.")] = "10,30,100,300,1000",
    seeds: Seeds = "0-7",
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    batch: Annotated[int, typer.Option(help="Samples in a step, of 64.", min=1)] = 16,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """The influence function as the limit of expected leave-one-out, on a convex model."""
    from experiments.small.limit import study as run
    from experiments.small.pages import limit_page

    _begin(plot)
    with output.progress() as say:
        found = run(_words(models), _numbers(steps), seeds_of(seeds), rate=rate, batch=batch, say=say)
    _end(found, plot, limit_page, json, tables.limit_table)


@app.command()
def kinks(
    activation: Annotated[str, typer.Option(help="relu, gelu, or both with a comma.")] = "relu,gelu",
    setup: Annotated[str, typer.Option(help="paper: the paper's run; smooth: the GELU net's.")] = "paper",
    model: Model = "mlp",
    seeds: Seeds = "0-2",
    removals: Samples = 20,
    images: Images = 1500,
    epochs: Epochs = 3,
    factors: Annotated[
        str, typer.Option(help="Shares of a sample's weight that are removed.")
    ] = "1,0.1,0.01,1e-4,1e-5",
    cache: Cache = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """How much of the gap between exact unrolling and retraining is the fault of kinks."""
    from experiments.data.images import setup_of
    from experiments.small.kinks import study as run
    from experiments.small.pages import kinks_page

    if setup not in ("paper", "smooth"):
        raise typer.BadParameter(f"found --setup {setup!r}; expected paper or smooth.")
    _begin(plot)
    chosen = setup_of(model, "relu" if setup == "paper" else "gelu", "sgd", epochs, images)
    with output.progress() as say:
        found = run(
            chosen, seeds_of(seeds), _words(activation), count=removals, factors=_floats(factors), cache=cache, say=say
        )  # fmt: skip
    _end(found, plot, kinks_page, json, tables.kinks_table)


@app.command()
def bound(
    seed: Annotated[int, typer.Option(help="Data, start, order and removals.")] = 0,
    removals: Annotated[int, typer.Option(help="Occurrences to remove, one at a time.", min=1)] = 12,
    c: Annotated[float, typer.Option("--C", help="The rates are C/√(T t) at step t of T.")] = 4.0,
    hidden: Annotated[int, typer.Option(help="Hidden units of the net on 8 × 8 digits.", min=1)] = 4,
    images: Images = 96,
    epochs: Epochs = 10,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """The paper's error bound with measured constants, beside the actual errors."""
    from dataclasses import replace

    from experiments.data.images import setup_of
    from experiments.small.bound import study as run
    from experiments.small.pages import bound_page

    _begin(plot)
    chosen = replace(setup_of("tiny", "gelu", "sgd", epochs, images), hidden=hidden)
    with output.progress() as say:
        found = run(chosen, seed, C=c, count=removals, say=say)
    _end(found, plot, bound_page, json, tables.bound_table)


@app.command()
def duplicates(
    model: Model = "mlp",
    seeds: Seeds = "0-2",
    copies: Annotated[int, typer.Option(help="Samples with an early and a late copy.", min=2)] = 20,
    rank: Annotated[int, typer.Option(help="Of the recorded run's learned projection.", min=1)] = 16,
    images: Images = 3000,
    epochs: Epochs = 3,
    cache: Cache = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Copies of one sample, early and late in training: two values, or one?"""
    from experiments.data.images import setup_of
    from experiments.small.duplicates import study as run
    from experiments.small.pages import duplicates_page

    _begin(plot)
    chosen = setup_of(model, "gelu", "sgd", epochs, images)
    with output.progress() as say:
        found = run(chosen, seeds_of(seeds), count=copies, rank=rank, cache=cache, say=say)
    _end(found, plot, duplicates_page, json, tables.duplicates_table)


@app.command()
def ablation(
    ranks: Annotated[str, typer.Option(help="Of each side of a layer.")] = "4,8,16,32",
    projections: Annotated[str, typer.Option(help="learned, random, mask.")] = "learned,random,mask",
    curvatures: Annotated[str, typer.Option(help="As in record.")] = "empirical,sampled:1,sampled:4,exact:10",
    warmup: Annotated[str, typer.Option(help="What a projection is learned from: steps, or epoch.")] = "20",
    model: Model = "mlp",
    seeds: Seeds = "0-1",
    removals: Samples = 60,
    images: Images = 1000,
    epochs: Epochs = 3,
    cache: Cache = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """What a record must keep: ranks × projections × curvature rows, with their bytes."""
    from experiments.data.images import setup_of
    from experiments.small.ablation import study as run
    from experiments.small.pages import ablation_page

    _begin(plot)
    chosen = setup_of(model, "gelu", "sgd", epochs, images)
    with output.progress() as say:
        found = run(
            chosen, seeds_of(seeds), ranks=_numbers(ranks), projections=_words(projections),
            curvatures=_words(curvatures), warmups=_words(warmup), count=removals, cache=cache, say=say,
        )  # fmt: skip
    _end(found, plot, ablation_page, json, tables.ablation_table)


def _begin(plot: Path | None) -> None:
    import torch

    output.plotting(plot)
    torch.set_num_threads(1)


def _end(
    found: dict[str, Any],
    plot: Path | None,
    page: Callable[[tables.Found], str],
    json: bool,
    table: Callable[[tables.Found], None],
) -> None:
    if plot is not None:
        plot.write_text(page(found), encoding="utf-8")
    if json:
        output.emit(found)
    else:
        table(found)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    return [int(x) for x in _floats(text)]


def _floats(text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        raise typer.BadParameter(f"found {text!r}; expected numbers with commas, such as 4,8,16.") from None
