"""`python -m experiments limit, kinks, bound, duplicates, ablation`: one question each, in minutes."""

from typing import Annotated

import typer

from backstory.cli import output
from experiments.cli import (
    Cache,
    Json,
    Plot,
    Samples,
    Seeds,
    app,
    begin,
    finish,
    floats_of,
    numbers_of,
    seeds_of,
    words_of,
)
from experiments.small import tables

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
    from experiments.small.limit import study
    from experiments.small.pages import limit_page

    begin(plot)
    with output.progress() as say:
        result = study(words_of(models), numbers_of(steps), seeds_of(seeds), rate=rate, batch=batch, say=say)
    finish(result, tables.limit_table, json=json, files={plot: limit_page})


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
    from experiments.small.kinks import study
    from experiments.small.pages import kinks_page

    if setup not in ("paper", "smooth"):
        raise typer.BadParameter(f"--setup must be paper or smooth, got {setup!r}.")
    begin(plot)
    chosen = setup_of(model, "relu" if setup == "paper" else "gelu", "sgd", epochs, images)
    with output.progress() as say:
        result = study(
            chosen, seeds_of(seeds), words_of(activation), count=removals, factors=floats_of(factors), cache=cache, say=say
        )  # fmt: skip
    finish(result, tables.kinks_table, json=json, files={plot: kinks_page})


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
    from experiments.small.bound import study
    from experiments.small.pages import bound_page

    begin(plot)
    chosen = replace(setup_of("tiny", "gelu", "sgd", epochs, images), hidden=hidden)
    with output.progress() as say:
        result = study(chosen, seed, C=c, count=removals, say=say)
    finish(result, tables.bound_table, json=json, files={plot: bound_page})


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
    from experiments.small.duplicates import study
    from experiments.small.pages import duplicates_page

    begin(plot)
    chosen = setup_of(model, "gelu", "sgd", epochs, images)
    with output.progress() as say:
        result = study(chosen, seeds_of(seeds), count=copies, rank=rank, cache=cache, say=say)
    finish(result, tables.duplicates_table, json=json, files={plot: duplicates_page})


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
    from experiments.small.ablation import study
    from experiments.small.pages import ablation_page

    begin(plot)
    chosen = setup_of(model, "gelu", "sgd", epochs, images)
    with output.progress() as say:
        result = study(
            chosen, seeds_of(seeds), ranks=numbers_of(ranks), projections=words_of(projections),
            curvatures=words_of(curvatures), warmups=words_of(warmup), count=removals, cache=cache, say=say,
        )  # fmt: skip
    finish(result, tables.ablation_table, json=json, files={plot: ablation_page})
