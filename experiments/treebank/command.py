"""`python -m experiments treebank`: influence over three epochs of a small GPT on the Penn Treebank."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Json, app


@app.command()
def treebank(
    out: Annotated[Path, typer.Option(help="Folder for the run and the pages.")] = Path("treebank"),
    sequences: Annotated[int, typer.Option(help="Sequences to train on.", min=16)] = 4800,
    epochs: Annotated[int, typer.Option(help="How often each is used.", min=1)] = 3,
    copies: Annotated[int, typer.Option(help="Training sequences that are asked about as queries.", min=3)] = 240,
    proofs: Annotated[
        int, typer.Option(help="Copies that are also checked by retraining the first epoch.", min=0)
    ] = 12,
    seed: Annotated[int, typer.Option(help="Of the sequences, their order, the start and the copies.")] = 0,
    json: Json = False,
) -> None:
    """When data mattered, how it faded, and whether copies of training sequences find their originals."""
    import torch

    from experiments.treebank.pages import pages
    from experiments.treebank.run import TreebankSetup
    from experiments.treebank.study import study as run

    output.need("plotly", extra="plot")
    torch.set_num_threads(1)
    setup = TreebankSetup(sequences=sequences, epochs=epochs, seed=seed)
    with output.progress() as say:
        result = run(setup, out, count=copies, checked=proofs, say=say)
    for name, text in pages(result).items():
        (out / name).write_text(text, encoding="utf-8")
    if json:
        output.emit(result.as_dict())
    else:
        _tables(result.as_dict(), out)


def _tables(result: Mapping[str, Any], out: Path) -> None:
    for name, phases in (
        ("in the sizes, by learning rate", result["timeline"]["phases"]),
        ("in the sizes as they are", result["phases_of_undivided_sizes"]),
        ("in the mean with its sign, by learning rate", result["phases_of_signed_means"]),
    ):
        output.out.print(f"Phases, {name}: {phases['words']}", soft_wrap=True, highlight=False)
    _evolution(result)
    rows = [
        (c["epoch"], c["method"], f"{c['share_first']:.1%}", f"{c['median_rank']:g}", f"{max(c['rank']):.0f}")
        for c in result["copies"]
    ]
    title = (
        f"{len(result['copies'][0]['rank'])} copies: the original among {result['copies'][0]['samples']:,} sequences"
    )
    output.table(title, ("after epoch", "method", "ranks first", "median rank", "worst rank"), rows)
    _proven(result["proven"])
    losses = [(at["at"], f"{at['copies']:.3f}", f"{at['unseen']:.3f}") for at in result["losses"]]
    output.table("Loss at each epoch's end, nats a word", ("step", "copies", "unseen"), losses)
    times = ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items())
    output.out.print(f"Time: {times}.\nRun: {result['run']}\nPages: {out}", soft_wrap=True, highlight=False)
    output.out.print(result["caution"], soft_wrap=True, highlight=False)


def _proven(result: Mapping[str, Any] | None) -> None:
    """What retraining says of originals, and of other sequences that were named before them."""
    if result is None:
        return
    rows = [
        (name, result[key], *("–" if result[f"{key}_{k}"] is None else f"{result[f'{key}_{k}']:+.3f}" for k in ("said", "truth")))
        for name, key in (("originals", "originals"), ("others, named first", "others"))
    ]  # fmt: skip
    title = f"First epoch retrained: the original was worth more in {result['original_was_worth_more']} of {result['others']}"
    output.table(title, ("left out", "how many", "said, median", "truth, median"), rows)


def _evolution(result: Mapping[str, Any]) -> None:
    """Sizes, and means with their sign."""
    signed, sizes = result["evolution"], result["evolution_of_sizes"]
    rows = [
        (at, *(_number(sizes[g][k], ".2g") for g in sizes), *(_number(signed["mean"][g][k], "+.2g") for g in sizes))
        for k, at in enumerate(signed["checkpoints"])
    ]
    title = "Influence of what each third of the steps used on the model at each checkpoint (nats a word)"
    output.table(title, ("checkpoint", *(f"{g}: size" for g in sizes), *(f"{g}: mean" for g in sizes)), rows)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)
