"""What the commands of all studies share: the app that they join, their options, and how they begin and end."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from backstory.cli.options import Json as Json

app = typer.Typer(help="Compare attribution methods with retraining; one thread, all from seeds.", no_args_is_help=True)
Seeds = Annotated[str, typer.Option(help="Such as 0-4, or 0,2,5: data, start, order and removals.")]
Methods = Annotated[str | None, typer.Option(help="Names of rows, with commas; without it, all.")]
Cache = Annotated[Path | None, typer.Option(help="Folder for the retrained results, to go on from.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")]
Plot = Annotated[Path | None, typer.Option(help="Write a page with the figures, such as page.html.")]
Samples = Annotated[int, typer.Option(help="Samples to remove, for each seed.", min=2)]
Sequences = Annotated[int, typer.Option(help="Sequences to remove, for each seed.", min=2)]
Mode = Annotated[str, typer.Option(help="finetune, or scratch.")]
Result = Mapping[str, Any]  # of a study, as plain values


@app.callback()
def root() -> None:
    """Compare attribution methods with retraining; one thread, all from seeds."""


def begin(plot: Path | None = None, markdown: Path | None = None) -> None:
    """One thread; and files that cannot be written are refused before the work."""
    import torch

    output.plotting(plot)
    output.writable(markdown)
    torch.set_num_threads(1)


def finish(
    result: Result,
    print_tables: Callable[[Any], None],
    *,
    json: bool,
    files: Mapping[Path | None, Callable[[Any], str]] | None = None,
) -> None:
    """Write the files that were asked for, then JSON or tables."""
    for file, text in (files or {}).items():
        if file is not None:
            file.write_text(text(result), encoding="utf-8")
    if json:
        output.emit(result)
    else:
        print_tables(result)


def seeds_of(text: str) -> list[int]:
    """ "0-4" or "0,2,5" as numbers."""
    try:
        parts = [[int(x) for x in part.split("-")] for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"seeds must be a range such as 0-4 or a list such as 0,2,5, got {text!r}.") from None
    return list(dict.fromkeys(s for part in parts for s in range(part[0], part[-1] + 1)))


def words_of(text: str) -> list[str]:
    """Words with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]


def names_of(text: str | None) -> list[str] | None:
    """The same; None stays None."""
    return None if text is None else words_of(text)


def floats_of(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        return [float(word) for word in words_of(text)]
    except ValueError:
        raise typer.BadParameter(f"must be comma-separated numbers such as 4,8,16, got {text!r}.") from None


def numbers_of(text: str) -> list[int]:
    """Whole ones."""
    return [int(x) for x in floats_of(text)]
