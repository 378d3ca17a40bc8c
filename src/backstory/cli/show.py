"""How the command line prints: tables, progress on a terminal, one JSON object last with --json."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

out = Console()
err = Console(stderr=True)


def as_json(value: Any) -> str:
    """One line of strict JSON; NaN and Inf become null."""
    return json.dumps(_plain(value), allow_nan=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object, unwrapped."""
    print(as_json(value))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        drawn.add_column(name)
    for row in rows:
        drawn.add_row(*(str(x) for x in row))
    out.print(drawn)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function (stage, done, in all) that draws one bar for each stage, on the error stream."""
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err
    )
    tasks: dict[str, Any] = {}

    def say(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield say


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
