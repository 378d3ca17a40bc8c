"""`python -m experiments bench serve`: typed text to ranked answer, through the service."""

from pathlib import Path
from typing import Annotated

import typer

from backstory.cli import output
from experiments.bench import command as bench
from experiments.cli import Json


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
    output.need("fastapi", "uvicorn", extra="web")
    from experiments.bench.serving import bench_serve

    found = bench_serve(
        run, scale=scale, clients=clients, seconds=seconds, questions=questions, starts=starts, say=bench._say
    )
    bench._finish("serve", found, json)
