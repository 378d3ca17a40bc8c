"""How studies write their numbers: in a cell, as Markdown, on the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backstory.cli import output

DASH = "–"


def bounded(mean: float, bounds: Mapping[str, float]) -> str:
    """A mean with its interval."""
    return f"{mean:.3f} [{bounds['lower']:.3f}, {bounds['upper']:.3f}]"


def signed(value: Mapping[str, float] | None) -> str:
    """A difference with its interval; a dash where there is none."""
    return DASH if value is None else f"{value['mean']:+.3f} [{value['lower']:+.3f}, {value['upper']:+.3f}]"


def each(values: Iterable[float], form: str = ".2f") -> str:
    """Numbers side by side."""
    return " ".join(format(x, form) for x in values)


def number(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return DASH if value is None else format(value, form)


def size(n: float) -> str:
    """Bytes in MB or GB; a dash for none."""
    return DASH if not n else f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "|" + "|".join(f" {cell} " if k != 1 else str(cell) for cell in row) + "|" for k, row in enumerate(lines)
    )


def left_out(reasons: Sequence[str]) -> None:
    """Print which rows are not there, and why."""
    for reason in reasons:
        output.out.print(f"left out: {reason}", soft_wrap=True)
