"""`python -m experiments domains`: what each source of text is worth for each domain, against retraining without it."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments import tables
from experiments.cli import Cache, Json, Mode, Plot, Seeds, app, begin, finish, names_of, seeds_of

Only = Annotated[str | None, typer.Option(help="recorded, paper, tracin, influence, exact; without it, all.")]
COLUMNS = (
    "method", "all cells", "without the diagonal", "other sources in a domain", "best other", "signs", "large ones", "scale",
    "− tracin",
)  # fmt: skip


@app.command()
def domains(
    mode: Mode = "finetune",
    seeds: Seeds = "0-2",
    methods: Only = None,
    cache: Cache = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Source × domain: summed influence against retraining without each source, or half of it, on a small GPT."""
    from experiments.data.texts import setup_named
    from experiments.domains.page import page
    from experiments.domains.study import study

    begin(plot)
    with output.progress() as say:
        result = study(setup_named(mode), seeds_of(seeds), only=names_of(methods), cache=cache, say=say)
    finish(result, print_tables, json=json, files={plot: page})


def print_tables(result: Mapping[str, Any]) -> None:
    """One table for whole sources, one for halves."""
    for part, what in (("whole", "each source"), ("half", "half of each source")):
        title = (
            f"GPT, {result['setup']['mode']}: Spearman with retraining without {what}, mean of {len(result['seeds'])} seeds "
            "and its 95 % bootstrap interval"
        )
        output.table(title, COLUMNS, [_line(row["method"], row[part]) for row in result["rows"]])
    tables.left_out(result["failed"])


def _line(method: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    less = row.get("minus_tracin")
    name = f"{method} ({row['chosen']})" if "chosen" in row else method
    ranks = *(tables.bounded(row[kind]["mean"], row[kind]) for kind in ("all", "off")), f"{row['within']:.3f}"
    shares = [f"{x:.0%}" for x in (row["best_other"], row["all"]["signs"], row["large_signs"])]
    return name, *ranks, *shares, f"{row['scale']:.3g}", tables.signed(less["all"] if less else None)
