"""`backstory index`: approximate search over the stored embeddings, and how much of the exact answer it finds."""

from pathlib import Path
from typing import Annotated

import typer

from . import data, show
from .options import Json


def index(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was embedded.", show_default=False)],
    at: Annotated[str, typer.Option(help="final, or the step whose embeddings are indexed.")] = "final",
    recall: Annotated[
        float,
        typer.Option(help="The part of the 10 highest and of the 10 lowest that is to be found.", min=0.0, max=1.0),
    ] = 0.95,
    queries: Annotated[int, typer.Option(help="Gradient rows of the run to measure it on.", min=1)] = 64,
    json: Json = False,
) -> None:
    """Index the embeddings for questions that want the highest and lowest influences alone (`method="index"`)."""
    from ..run.run import Run

    with show.progress() as say:
        report = Run(run).build_index(
            data.at(at), recall=recall, queries=queries, progress=lambda done, total: say("index", done, total)
        )
    if json:
        show.emit(report.as_dict())
        return
    show.out.print(
        f"{report.occurrences:,} embeddings at step {report.at} are indexed ({report.bytes / 1e6:,.1f} MB, {report.seconds:.1f} s). "
        f"Searching {report.probes} of {report.partitions} partitions finds {report.recall_highest:.1%} of the {report.k} highest and "
        f"{report.recall_lowest:.1%} of the {report.k} lowest influences on {report.queries} gradient rows of the run: "
        f"{report.index_seconds * 1e3:.1f} ms a question, {report.exact_seconds * 1e3:.1f} ms by all embeddings.",
        soft_wrap=True,
    )
