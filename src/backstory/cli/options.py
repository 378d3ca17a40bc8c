"""Options that several commands share, each said once, and the readers of their lists."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last.")]
Seeds = Annotated[str, typer.Option(help="Such as 0-4, or 0,2,5: data, start, order and removals.")]
Methods = Annotated[str | None, typer.Option(help="Names of rows, with commas; without it, all.")]
Cache = Annotated[Path | None, typer.Option(help="Folder for the retrained results, to go on from.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")]
Samples = Annotated[int, typer.Option(help="Samples to remove, for each seed.", min=2)]
Sequences = Annotated[int, typer.Option(help="Sequences to remove, for each seed.", min=2)]
Mode = Annotated[str, typer.Option(help="finetune, or scratch.")]


def seeds_of(text: str) -> list[int]:
    """ "0-4" or "0,2,5" as numbers."""
    try:
        parts = [[int(x) for x in part.split("-")] for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"found seeds {text!r}; expected such as 0-4, or 0,2,5.") from None
    return list(dict.fromkeys(s for part in parts for s in range(part[0], part[-1] + 1)))


def names_of(text: str | None) -> list[str] | None:
    """Words with commas between them; None stays None."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]
