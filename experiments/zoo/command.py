"""`python -m experiments zoo`: which families of models record as they are, and how exactly."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Json, Markdown, app, begin, finish, names_of

COLUMNS = ("family", "result", "largest error", "coverage", "CPU ×", "remedy works")


@app.command()
def zoo(
    only: Annotated[str | None, typer.Option(help="Names of families, with commas; without it, all.")] = None,
    markdown: Markdown = None,
    json: Json = False,
) -> None:
    """Small models of many families, recorded at the defaults, beside one backward pass per sample."""
    from experiments.zoo.study import study

    begin(markdown=markdown)
    with output.progress() as say:
        result = study(names_of(only), say=say)
    finish(result, print_tables, json=json, files={markdown: page})


def cells(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table."""
    return [
        (
            r["name"], r["result"], "–" if r["largest_error"] is None else f"{r['largest_error']:.0e}",
            "–" if r["coverage"] is None else f"{r['coverage']:.1%}", "–" if r["overhead"] is None else f"{r['overhead']:.1f}",
            {True: "yes", False: "no", None: ""}[r["remedy_works"]],
        )
        for r in result["families"]
    ]  # fmt: skip


def print_tables(result: Mapping[str, Any]) -> None:
    """The table on a terminal."""
    output.table("Families", COLUMNS, cells(result))
    for r in result["families"]:
        if r["reason"]:
            print(f"{r['name']}: {r['reason']}")


def page(result: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    from experiments.tables import markdown

    return markdown(COLUMNS, cells(result)) + "\n"
