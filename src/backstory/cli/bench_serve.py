"""`backstory bench serve`: typed text to ranked answer, through the service.

Knows nothing of how it is measured.
"""

from pathlib import Path
from typing import Annotated

import typer

from . import bench, data, show
from .options import Json

COLUMNS = (
    ("occurrences", "occurrences"), ("dims", "dims"), ("start_s", "start, s"),
    ("cold_median_s", "cold, s"), ("cold_p95_s", "cold p95, s"), ("warm_median_s", "warm, s"), ("warm_p95_s", "warm p95, s"),
    ("clients", "clients"), ("answers_per_s", "answers/s"), ("crowd_median_s", "with them, s"), ("crowd_p95_s", "p95, s"),
    ("errors", "errors"), ("memory_growth", "memory growth"),
)  # fmt: skip


@bench.app.command()
def serve(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run of text; without it one of 20,480 occurrences is made.", show_default=False),
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 32,
    seconds: Annotated[float, typer.Option(help="How long they ask.", min=0.1)] = 60.0,
    questions: Annotated[int, typer.Option(help="Questions one after the other.", min=1)] = 100,
    starts: Annotated[int, typer.Option(help="Cold starts.", min=1)] = 5,
    scale: bench.Scale = "full",
    json: Json = False,
) -> None:
    """Typed text to ranked answer over HTTP: cold, warm, and many clients at once.

    With RUN, the code of the recipe that the run names is imported.
    """
    data.need("fastapi", "uvicorn", extra="web")
    from ..benchmarks.serving import bench_serve

    found = bench_serve(
        run, scale=scale, clients=clients, seconds=seconds, questions=questions, starts=starts, say=_say
    )
    if json:
        show.emit(found)
        return
    cells = [[_short(row.get(key)) for key, _ in COLUMNS] for row in found["rows"]]
    show.table("serve", [heading for _, heading in COLUMNS], cells)


def _say(text: str) -> None:
    show.err.print(text, highlight=False, markup=False, soft_wrap=True)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else "–"
