"""How the command line prints: results with their tables and remarks, progress on a terminal, JSON; and what it needs to write files."""

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import UsageError

if TYPE_CHECKING:
    from ..results.result import Result

out = Console()
err = Console(stderr=True)


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, unwrapped; NaN and Inf become null."""
    from ..results.row import plain

    print(json.dumps(plain(value), allow_nan=False))


def line(text: str) -> None:
    """Print one line as it is: not wrapped, brackets in it are no markup."""
    out.print(text, soft_wrap=True, highlight=False, markup=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; brackets in its cells are no markup."""
    drawn = Table(title=escape(title), title_justify="left", title_style="bold")
    for name in columns:
        drawn.add_column(escape(name))
    for row in rows:
        drawn.add_row(*(escape(str(x)) for x in row))
    out.print(drawn)


def remarks(result: "Result") -> None:
    """What a result shows in sentences, then what must be said with its numbers: sign, unit, caveats, quality."""
    for text in result.words:
        line(text)
    for text in result.remarks:
        line(f"note: {text}")


def write_page(result: "Result", file: Path, about: str) -> None:
    """All figures of a result on one HTML page that needs no network."""
    from ..results.figures import page

    figures = [result.figure(name) for name in result.drawings()]
    words = " ".join((about, *result.words, *result.remarks))
    file.write_text(page(result.headline, words, *figures), encoding="utf-8")


def number(x: float) -> str:
    """An influence with its sign; a dash for what is not a number."""
    return "–" if x != x else f"{x:+.4g}"


def shorten(text: str | None, most: int = 80) -> str:
    """The beginning of a text on one line."""
    words = " ".join((text or "").split())
    return words if len(words) <= most else words[: most - 1] + "…"


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function (stage, done, in all) that draws one bar for each stage, on the error stream."""
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err
    )
    tasks: dict[str, Any] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield report


@contextmanager
def one_bar(stage: str) -> Iterator[Callable[[int, int], None]]:
    """The same for work of one stage: a function (done, in all)."""
    with progress() as report:
        yield lambda done, total: report(stage, done, total)


def need(*packages: str, extra: str) -> None:
    """Raise if an optional package is missing, before any work is done."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"this command needs {', '.join(missing)}: pip install 'backstory[{extra}]'.")


def writable(*files: Path | None) -> None:
    """Refuse a file whose folder does not exist, before any work is done."""
    for file in filter(None, files):
        if not file.resolve().parent.is_dir():
            raise UsageError(
                f"there is no folder {file.resolve().parent} for {file.name}. Make it first, or name another."
            )


def plotting(*files: Path | None) -> None:
    """What pages with figures need: Plotly, and folders to write them into."""
    if any(file is not None for file in files):
        need("plotly", extra="plot")
    writable(*files)
