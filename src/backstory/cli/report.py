"""`backstory report`: a run as one HTML file to send to a colleague."""

from pathlib import Path
from typing import Annotated

import typer

from . import data, recipes, show
from .insight import RecipeName, RunPath, Trusted
from .options import Json


def report(
    run: RunPath,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    queries: Annotated[
        str | None, typer.Option(help="A query set of the run or its recipe; without it, the first.")
    ] = None,
    recipe: RecipeName = None,
    trust_recipe: Trusted = False,
    json: Json = False,
) -> None:
    """Write what a run tells into one HTML file that needs no network. The file contains training data."""
    data.need("plotly", "jinja2", "pydantic", "fastapi", extra="web")
    from ..web import report as made
    from ..web.state import Opened

    data.writable(out)
    name = recipes.confirm(run, recipe, trust_recipe)
    found = made.gathered(Opened(run, name), queries)
    out.write_text(made.report(found), encoding="utf-8")
    if json:
        show.emit({"report": str(out)})
        return
    show.out.print(f"Report: {out} (it contains training data)", soft_wrap=True)
