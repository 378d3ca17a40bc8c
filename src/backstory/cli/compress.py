"""`backstory compress`: the same run, smaller."""

from pathlib import Path
from typing import Annotated

import typer

from . import show
from .options import Json


def compress(
    run: Annotated[Path, typer.Argument(help="The folder of a recorded run.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder for the compressed run.", show_default=False)],
    rank: Annotated[int, typer.Option(help="Directions of curvature to keep for each window; 0: all.", min=0)] = 512,
    windows: Annotated[
        int | None, typer.Option(help="Into how many parts the run is cut; chosen without it.", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Write a run with its curvature as the mean of windows of steps: smaller, and embedded faster."""
    from ..run.run import Run

    with show.progress() as say:
        report = Run(run).compress(
            out, rank=rank or None, windows=windows, progress=lambda done, total: say("compress", done, total)
        )
    if json:
        show.emit(report.as_dict())
        return
    show.out.print(
        f"{report.bytes_before / 1e6:,.1f} MB became {report.bytes_after / 1e6:,.1f} MB in {report.path}: {report.rows:,} rows of "
        f"curvature in {report.windows} windows hold {report.energy:.1%} of its trace.",
        soft_wrap=True,
    )
