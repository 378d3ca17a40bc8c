"""`python -m experiments lds`: the linear datamodeling score of every method on a small GPT, fine-tuned and from scratch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments import tables
from experiments.cli import Cache, Json, Methods, Seeds, app, begin, finish, names_of, seeds_of, words_of

COLUMNS = ("method", "LDS [95 %, drops]", "95 %, queries", "median query", "each seed", "CPU seconds")
WORDS = """# The linear datamodeling score

{provenance}

The tables of this page are also in [{name}.json]({name}.json).

LDS as bergson's leaderboard defines it: for each query the rank correlation between the summed scores of what is dropped and the change of the query's loss by
retraining without it, over {drops} random drops of {share:.0%} of the training set; the mean over {queries} single texts, and its 95 % interval of {draws:,} bootstrap draws
of the drops, as there. A second interval draws the queries instead: what other texts would give. The models are small GPTs of the study (bytes, 48 a text, AdamW, clipping): the leaderboard's own figures are of GPT-2 and are not comparable.
CPU seconds are those of a row alone; a recording includes its training, the methods that need only the trained model include none.
"""


@app.command()
def lds(
    modes: Annotated[str, typer.Option(help="finetune, scratch, or both with a comma.")] = "finetune,scratch",
    seeds: Seeds = "20",
    drops: Annotated[int, typer.Option(help="Random drops, for each seed.", min=3)] = 100,
    queries: Annotated[int, typer.Option(help="Single texts.", min=2)] = 50,
    methods: Methods = None,
    cache: Cache = None,
    page: Annotated[Path | None, typer.Option(help="Write the page, and its tables as JSON beside it.")] = None,
    json: Json = False,
) -> None:
    """LDS of every method: random drops of 1 % of the training set, single-text queries, with CPU seconds."""
    from experiments.gpt.setups import setup_named
    from experiments.lds.study import LdsSetup, study

    begin(markdown=page)
    chosen = [LdsSetup(gpt=setup_named(mode), drops=drops, queries=queries) for mode in words_of(modes)]
    with output.progress() as say:
        results = [study(one, seeds_of(seeds), only=names_of(methods), cache=cache, say=say) for one in chosen]
    if page is not None:
        from experiments.pages import write_page

        write_page(page, as_page(results, page.stem, f"python -m experiments lds --modes {modes} --seeds {seeds}"))
    finish({"runs": results}, print_tables, json=json)


def print_tables(result: Mapping[str, Any]) -> None:
    """One table for each run."""
    for one in result["runs"]:
        output.table(_title(one), COLUMNS, _lines(one))


def as_page(results: Sequence[Mapping[str, Any]], name: str, command: str) -> str:
    """The page of these results."""
    from experiments.pages import provenance

    setup = results[0]["setup"]
    head = WORDS.format(
        provenance=provenance([command]), name=name, draws=results[0]["draws"],
        **{key: setup[key] for key in ("drops", "share", "queries")},
    )  # fmt: skip
    parts = [f"## {_title(one)}\n\n{tables.markdown(COLUMNS, _lines(one))}\n\n{_costs(one)}\n" for one in results]
    return "\n".join([head, *parts])


def _title(one: Mapping[str, Any]) -> str:
    kind = {"finetune": "fine-tuned GPT", "scratch": "GPT from scratch"}[one["setup"]["gpt"]["mode"]]
    return f"{kind}, {'seed' if len(one['seeds']) == 1 else 'seeds'} {', '.join(map(str, one['seeds']))}"


def _lines(one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (row["method"], tables.bounded(row["mean"], row["interval"]), "{lower:.3f}, {upper:.3f}".format(**row["over_queries"]),
         f"{row['median']:.3f}", tables.each(row["seeds"]), f"{row['cpu_seconds']:,.1f}")
        for row in one["rows"]
    ]  # fmt: skip


def _costs(one: Mapping[str, Any]) -> str:
    return (
        f"Training once takes {one['training_cpu_seconds']:,.1f} CPU seconds, retraining without each drop "
        f"{one['retraining_cpu_seconds']:,.0f} (float64)."
    )
