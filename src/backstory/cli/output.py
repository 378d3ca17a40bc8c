"""How the command line prints: results with their tables and notes in 80 columns, progress, JSON; and what it needs to write files."""

import importlib.util
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import MINIMAL
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import UsageError

if TYPE_CHECKING:
    from ..results.influence import Hit
    from ..results.result import Result

out = Console()
err = Console(stderr=True)
NUMBER = re.compile(r"[-+−]?\d[\d,]*(\.\d+)?(e[-+]\d+)?%?|–|")
BLOCKS, ABOVE, BELOW = "▁▂▃▄▅▆▇█", "↑", "↓"
QUIET, EVERY = 2.0, 5.0  # seconds: work that is done before needs no progress, and the time between two lines of it
NARROW = 20  # letters of a text, at least
LONGEST = 30  # letters of a name in the first column; a longer one is wrapped
FARTHEST, OUTER = 3, 0.03  # times the reach of all values but that part at either end: beyond it, a sparkline goes flat
RANGE = 24  # letters beside a sparkline: two spaces and `-1.23e-05 to +1.23e-05`
SENTENCES = 3  # about the numbers that are printed without --notes


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object on one line, unwrapped; NaN and Inf become null."""
    from ..results.row import plain

    print(json.dumps(plain(value), allow_nan=False))


def line(text: str) -> None:
    """Print one line as it is: not wrapped, brackets in it are no markup."""
    out.print(text, soft_wrap=True, highlight=False, markup=False)


def sentence(text: str) -> None:
    """Print prose: as `line`, but wrapped between words."""
    out.print(text, highlight=False, markup=False)


# -- tables --------------------------------------------------------------------------------------------------------


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; brackets in its cells are no markup. A column named text gets the rest of the line, and is cut there."""
    drawn = Table(box=MINIMAL, show_edge=False)
    cells = [[str(x) for x in row] for row in rows]
    for k, name in enumerate(columns):
        numeric = all(NUMBER.fullmatch(row[k]) for row in cells)
        drawn.add_column(escape(name), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        if name == "text":
            last, drawn.expand = drawn.columns[-1], True
            last.ratio, last.width, last.no_wrap, last.overflow = 1, NARROW, True, "ellipsis"
    for row in cells:
        drawn.add_row(*map(escape, row))
    out.print()
    if title:
        out.print(title, style="bold", highlight=False, markup=False)
    out.print(drawn)


def hits(title: str, ranked: "Sequence[Hit]") -> None:
    """Print a ranking; columns without content are left out."""
    from ..results.influence import ranking

    if not ranked:
        line(f"\n{title}: none")
        return
    columns = ranking(ranked)
    forms: dict[str, Callable[[Any], str]] = {"influence": number, "text": shorten}
    cells = [[forms.get(name, _cell)(x) for x in values] for name, values in columns.items()]
    table(title, tuple(columns), list(zip(*cells, strict=True)))


def columns_that_fit(names: Sequence[str], first: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    """How many columns of the width of the widest fit beside the first one."""
    widest = max(len(x) for row in (names, *cells) for x in row)
    return max(2, (out.width - 2 - min(LONGEST, max(map(len, first)))) // (widest + 3))


def facts(pairs: Mapping[str, str]) -> None:
    """Print names and what there is to say of each, side by side; without a value: nothing."""
    drawn = Table.grid(padding=(0, 2))
    for name, value in pairs.items():
        if value:
            drawn.add_row(escape(name), escape(value))
    out.print(drawn)


def spread(count: int, most: int) -> list[int]:
    """At most `most` places of `count`, evenly; the first and the last are among them."""
    if count <= most:
        return list(range(count))
    return [round(k * (count - 1) / (most - 1)) for k in range(most)]


def number(x: float) -> str:
    """An influence with its sign; a dash for what is not a number."""
    from ..results.words import signed

    return signed(x)


def shorten(text: str | None, most: int = 200) -> str:
    """The beginning of a text on one line."""
    from ..results.words import first_words

    return first_words(text, most)


def _cell(value: Any) -> str:
    return "" if value is None else shorten(str(value))


# -- curves --------------------------------------------------------------------------------------------------------


def curves(title: str, values: Mapping[str, Sequence[float]]) -> None:
    """Print a sparkline for each curve over the steps from 0, with the ends of its scale and what lies beyond."""
    names = [name for name in values if any(x == x for x in values[name])]
    if not names:
        return
    left = max(map(len, names)) + 2
    width = out.width - left - RANGE
    line(f"\n{title}")
    for name in names:
        means = binned(values[name], width)
        known = [x for x in means if x == x]
        low, high = scale(known)
        line(f"{name:<{left}}{sparkline(means)}  {_span(low, high)}")
        if beyond := [x for x in known if not low <= x <= high]:
            marks = ABOVE * (max(beyond) > high) + BELOW * (min(beyond) < low)
            line(f"{'':<{left}}{marks} off the scale: {_span(min(beyond), max(beyond))}")
    last = f"step {len(values[names[0]]) - 1:,}"
    line(f"{'':<{left}}step 0{last:>{width - 6}}")


def binned(values: Sequence[float], width: int) -> list[float]:
    """Means of neighbours, so many that they fill the width; a short curve is stretched. NaN where nothing is known."""
    n, out = len(values), []
    for k in range(width):
        lo = k * n // width
        part = [x for x in values[lo : max(lo + 1, (k + 1) * n // width)] if x == x]
        out.append(sum(part) / len(part) if part else float("nan"))
    return out


def scale(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest value; without outer ones that lie so far out that they would flatten the rest."""
    ordered = sorted(values)
    cut = math.ceil(OUTER * len(ordered)) if len(ordered) >= len(BLOCKS) else 0
    low, high = ordered[cut], ordered[-1 - cut]
    reach = FARTHEST * (high - low)
    near = [x for x in ordered if low - reach <= x <= high + reach]
    return near[0], near[-1]


def sparkline(values: Sequence[float]) -> str:
    """A block for each value, a mark for one that is off the scale, a space where there is none."""
    low, high = scale([x for x in values if x == x])
    unit = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    blocks = [" " if x != x else BLOCKS[round((min(max(x, low), high) - low) * unit)] for x in values]
    return "".join(ABOVE if x > high else BELOW if x < low else b for x, b in zip(values, blocks, strict=True))


def _span(low: float, high: float) -> str:
    ends = [f"{x:.3g}" if low >= 0 else number(x) for x in (low, high)]
    return " to ".join(dict.fromkeys(ends))


# -- results -------------------------------------------------------------------------------------------------------


def remarks(result: "Result", everything: bool) -> None:
    """What a result shows in sentences, its quality, how to make it exact, then its sign; with everything: all its notes instead."""
    words = result.words if everything else result.words[:SENTENCES]
    out.print()
    for text in words:
        sentence(text)
    if not everything:
        judged = None if result.quality is None else result.quality.sentence
        for text in filter(None, (judged, result.to_exact)):
            sentence(text)
    notes(result.brief, (*result.words[len(words) :], *result.remarks), everything)


def notes(brief: str, texts: Sequence[str], everything: bool) -> None:
    """One line and how to see the rest, or the rest."""
    if not everything:
        sentence(f"{brief} {len(texts)} note{'s' * (len(texts) != 1)}: --notes")
        return
    for text in texts:
        sentence(f"- {text}")


def write_page(result: "Result", file: Path, about: str) -> None:
    """All figures of a result on one HTML page that needs no network."""
    from ..results.figures import page

    figures = [result.figure(name) for name in result.drawings()]
    words = " ".join((about, *result.words, *result.remarks))
    file.write_text(page(result.headline, words, *figures), encoding="utf-8")


# -- progress ------------------------------------------------------------------------------------------------------


def progress(clock: Callable[[], float] = time.monotonic) -> AbstractContextManager[Callable[[str, int, int], None]]:
    """A function (stage, done, in all) that reports on the error stream: bars on a terminal, else a line every few seconds.

    Nothing is printed for work that is done within two seconds.
    """
    return _bars(clock) if err.is_terminal else _lines(clock)


@contextmanager
def _bars(clock: Callable[[], float]) -> Iterator[Callable[[str, int, int], None]]:
    """One bar for each stage."""
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=err
    )
    tasks: dict[str, Any] = {}
    began = clock()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)
        if clock() - began >= QUIET:
            bars.start()

    try:
        yield report
    finally:
        if bars.live.is_started:
            bars.stop()


@contextmanager
def _lines(clock: Callable[[], float]) -> Iterator[Callable[[str, int, int], None]]:
    """One line every few seconds, and one at the end of a stage that had others."""
    began, last, shown = clock(), float("-inf"), set[str]()
    first: dict[str, tuple[float, int]] = {}  # of each stage: when it was first heard of, and how much was done

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        now, ended = clock(), done >= total and stage in shown
        start, before = first.setdefault(stage, (now, done))
        if now - began < QUIET or (now - last < EVERY and not ended):
            return
        last = now
        shown.discard(stage) if ended else shown.add(stage)
        left = (now - start) * (total - done) / (done - before) if done > before else 0.0
        text = f"{stage}: {done:,}/{total:,} ({done / max(1, total):.0%}{_time_left(left)})"
        err.print(text, soft_wrap=True, highlight=False, markup=False)

    yield report


def _time_left(seconds: float) -> str:
    from ..results.words import describe_duration

    return f", about {describe_duration(seconds)} left" if seconds else ""


@contextmanager
def one_bar(stage: str) -> Iterator[Callable[[int, int], None]]:
    """The same for work of one stage: a function (done, in all)."""
    with progress() as report:
        yield lambda done, total: report(stage, done, total)


# -- files ---------------------------------------------------------------------------------------------------------


def need(*packages: str, extra: str) -> None:
    """Raise if an optional package is missing, before any work is done."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"this command needs {', '.join(missing)}: pip install '.[{extra}]' in the checkout.")


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
