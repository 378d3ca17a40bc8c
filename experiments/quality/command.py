"""`python -m experiments quality`: is the measured quality right?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from backstory.errors import check_one_of
from experiments import tables
from experiments.cli import Json, app, begin, finish

Result = Mapping[str, Any]
BY_THIRDS = "Quality is the worse of a third's own two correlations; that of exact influences with retraining rests on a third of the calibration's uses."
COLUMNS = ("run", "quality", "retraining", "in it")
PARTS = ("run", "recorded with exact", "exact with retraining", "above rounding")
THIRDS = ("run", "quality, by thirds", "with retraining, by thirds")
WORDS = """# Is the measured quality right?

{provenance}

Commit: the one that brought these figures. The table is also in [{name}.json]({name}.json).

*Quality* is what `run.calibrate` measured: the worse of the rank correlations of recorded with exact influences (on the mean of unseen queries), and of
exact influences with training again without 24 single uses. *Retraining* is Spearman's correlation of recorded influences with what leaving out {removals} single uses did, drawn with another seed, a third
of them from each third of the run, with its 95 % bootstrap interval. *Above rounding*: the share of these whose effect is larger than that of starting one rounding unit away.

Quality lies in the interval in {right} of {count} runs. Runs that rank retraining below 0.6 and whose sentence says that they rank well: {flattered}.
"""


@app.command()
def quality(
    runs: Annotated[
        str | None, typer.Option(help="Names of runs, with commas replaced by ';'; without it, all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Data, start, order and removals.")] = 60,
    removals: Annotated[int, typer.Option(help="Single uses that are left out.", min=9)] = 180,
    calibrated: Annotated[int, typer.Option(help="The same, of the calibration.", min=8)] = 24,
    page: Annotated[Path | None, typer.Option(help="Write the page, and its tables as JSON beside it.")] = None,
    json: Json = False,
) -> None:
    """Compare the quality that calibration measures with retraining, on many kinds of run."""
    from experiments.quality.runs import KINDS
    from experiments.quality.study import study

    names = list(KINDS) if runs is None else [word for part in runs.split(";") for word in [part.strip()] if word]
    for name in names:
        check_one_of("run", name, tuple(KINDS))
    begin(markdown=page)
    with output.progress() as say:
        result = study(names, seed, removals=removals, calibrated=calibrated, say=say)
    if page is not None:
        from experiments.pages import write_page

        write_page(page, as_page(result, page.stem, f"python -m experiments quality --seed {seed} --json"))
    finish(result, print_tables, json=json)


def print_tables(result: Result) -> None:
    """A row for each run."""
    output.table(f"Quality and retraining, seed {result['seed']}", COLUMNS, _lines(result))
    output.table("What quality is the worse of", PARTS, _parts(result))
    output.table("By thirds of the run", THIRDS, _thirds(result))
    for row in result["rows"]:
        output.line(f"{row['run']}: {row['sentence']}")
    output.line(f"In the interval: {result['right']} of {len(result['rows'])}. Flattered: {result['flattered']}.")


def as_page(result: Result, name: str, command: str) -> str:
    """The page of this result."""
    from experiments.pages import provenance

    facts = {k: result[k] for k in ("removals", "right", "flattered")}
    head = WORDS.format(provenance=provenance([command]), name=name, count=len(result["rows"]), **facts)
    return "\n".join(
        [
            head,
            f"{tables.markdown(COLUMNS, _lines(result))}\n",
            f"## By thirds\n\n{BY_THIRDS}\n\n{tables.markdown(THIRDS, _thirds(result))}\n",
        ]
    )


def _lines(result: Result) -> list[tuple[str, ...]]:
    return [
        (row["run"], _number(row["quality"]), tables.bounded(row["retraining"]["rank"], row["retraining"]), "yes" if row["right"] else "no")
        for row in result["rows"]
    ]  # fmt: skip


def _parts(result: Result) -> list[tuple[str, ...]]:
    names = ("recorded_with_exact", "exact_with_retraining")
    return [(row["run"], *(_number(row[name]) for name in names), f"{row['clear']:.0%}") for row in result["rows"]]


def _thirds(result: Result) -> list[tuple[str, ...]]:
    return [
        (row["run"], *(" / ".join(map(_number, row["thirds"][kind])) for kind in ("quality", "retraining")))
        for row in result["rows"]
    ]


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"
