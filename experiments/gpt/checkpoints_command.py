"""`python -m experiments checkpoints`: a run that was never recorded, from its checkpoints alone."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Cache, Json, Mode, Seeds, Sequences, app, seeds_of


@app.command()
def checkpoints(
    mode: Mode = "finetune",
    seeds: Seeds = "0-2",
    numbers: Annotated[str, typer.Option(help="Of checkpoints, with commas; all: one after every step.")] = "5,20,all",
    removals: Sequences = 40,
    rank: Annotated[int, typer.Option(help="Of the learned projection.", min=1)] = 16,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Rank correlation with retraining of runs made from checkpoints, beside the recorded run, on a small GPT."""
    import torch

    from experiments.gpt.checkpoints import study as run
    from experiments.gpt.setups import setup_named

    torch.set_num_threads(1)
    with output.progress() as say:
        found = run(
            setup_named(mode), seeds_of(seeds), numbers=_numbers(numbers), count=removals, rank=rank, cache=cache,
            say=say,
        )  # fmt: skip
    if json:
        output.emit(found)
    else:
        _table(found)


def _numbers(text: str) -> list[int | None]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word == "all" or (word.isdigit() and int(word)) for word in words):
        raise typer.BadParameter(f"found --numbers {text!r}; expected numbers with commas, or all, such as 5,20,all.")
    return [None if word == "all" else int(word) for word in words]


def _table(found: Mapping[str, Any]) -> None:
    title = (
        f"GPT, {found['mode']}: Spearman with retraining, mean of four domains and of {len(found['seeds'])} seeds, "
        f"{found['removals']} removals each, learned {found['rank']}×{found['rank']}"
    )
    columns = ("checkpoints", "rows from", "Adam's second moment", "mean", "each seed")
    output.table(title, columns, [_line(row, found["steps"]) for row in found["rows"]])


def _line(row: Mapping[str, Any], steps: int) -> tuple[str, ...]:
    scores = f"{row['mean']:.3f}", " ".join(f"{x:.2f}" for x in row["each"])
    if row["checkpoints"] is None:
        return "–", "the recorded run", "as it was", *scores
    number = "all" if row["checkpoints"] == steps else str(row["checkpoints"])
    where = f"the checkpoint {row['nearest']} the step"
    return number, where, "of the checkpoint" if row["moments"] else "estimated", *scores
