"""`python -m experiments demo-queries`: sixteen typed texts against the run of `backstory demo text`, or those its settings were chosen on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Json, app, begin, finish

COLUMNS = ("domain", "typed text", "source that leads", "its total", "the domain's", "of the domain")


@app.command()
def demo_queries(
    out: Annotated[Path, typer.Option(help="The demo's folder; the demo runs into it if it has no run.")] = Path(
        "demo-text"
    ),
    development: Annotated[
        bool, typer.Option("--development", help="The texts that settings are chosen on, and not the sixteen.")
    ] = False,
    json: Json = False,
) -> None:
    """Does each of sixteen typed texts find its own domain in the text demo's run?

    They were written before the demo was run on any of them. To try settings, use --development.
    """
    from backstory.demo.texts import RECIPE, text_demo
    from experiments.demo_queries.development import DEVELOPMENT
    from experiments.demo_queries.queries import QUERIES
    from experiments.demo_queries.study import check_queries

    begin()
    with output.progress() as say:
        if not (out / "run").exists():
            text_demo(out, progress=say)
        result = check_queries(out / "run", RECIPE, DEVELOPMENT if development else QUERIES, say)
    finish(result, print_tables, json=json)


def print_tables(result: Mapping[str, Any]) -> None:
    """A row for each text, and the two counts."""
    from experiments.demo_queries.study import HALF, LEAST_HALF, LEAST_LEADING, least, lines

    rows = [(domain, output.shorten(text, 60), *rest) for domain, text, *rest in lines(result)]
    output.table(f"Typed texts: totals by source in nats, and the {result['top']} most helpful passages", COLUMNS, rows)
    n = len(rows)
    output.line(f"The text's own domain leads in {result['leading']} of {n} (wanted: {least(LEAST_LEADING, n)}).")
    output.line(
        f"{HALF} or more of the {result['top']} most helpful passages are of the domain in {result['half_of_the_top']} of {n} "
        f"(wanted: {least(LEAST_HALF, n)})."
    )
