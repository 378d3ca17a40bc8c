"""The base of all results: numbers with their sign, unit, caveats and measured quality, that can be shown and exported.

    as_dict()      plain values: what `--json` prints and the service sends
    to_pandas()    the table
    draw()         the figure as Plotly's own JSON, figure() the same as a Plotly object
    remarks        what a reader must know with the numbers; `brief` is the most important of it in one line

A subclass is a frozen dataclass with fields of its own beside `at`, `caveats`, `quality` and `recording`; it names what is its own in `as_dict()` (`shown`), and gives
`table` and `drawings`. The service describes its JSON by the types of what is named there: nothing describes it twice.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import BackstoryError, UnsupportedError, UsageError
from . import figures
from .origin import BY_REPLAY, IN_SHORT, Remedy, describe_origin
from .quality import Quality
from .recording_report import RecordingReport
from .row import plain
from .sign import SHORT, SIGN

ROWS = 10  # of a table that a notebook shows


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """A result that can be printed, drawn, sent and put into a table."""

    at: int  # the step whose model was queried
    caveats: tuple[str, ...] = ()
    quality: Quality | None = None  # how well its values rank, as far as it was measured; baselines have none
    recording: RecordingReport | None = None  # what the recorded steps are like; exact values have none
    remedy: Remedy | None = None  # what would make recorded values exact
    unit: ClassVar[str] = "units of the query's loss"
    sign: ClassVar[str] = SIGN
    shown: ClassVar[tuple[str, ...]] = ()  # fields, properties and methods that are its own in `as_dict()`

    @property
    def headline(self) -> str:
        """Its title."""
        return f"{type(self).__name__} of the model at step {self.at}"

    @property
    def title(self) -> str:
        """The headline, and which of its numbers are shown under it."""
        return self.headline

    @property
    def words(self) -> tuple[str, ...]:
        """What the numbers show, in plain sentences."""
        return ()

    @property
    def origin(self) -> str:
        """Whether the values are exact or from the recording, in one sentence; empty where neither is meant."""
        methods: str | Sequence[str] = getattr(self, "method", ())
        return describe_origin([methods] if isinstance(methods, str) else methods)

    @property
    def to_exact(self) -> str | None:
        """The command that would make recorded values exact, and how long it takes."""
        return None if self.remedy is None else str(self.remedy)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader must know with the numbers: sign, unit, origin, measured quality, caveats, and what the recording is like."""
        judged = None if self.quality is None else self.quality.sentence
        recorded = () if self.recording is None else self.recording.words
        notes = (self.origin, judged, *self.caveats, *recorded, self.to_exact)
        return self.sign, self.unit, *(x for x in notes if x)

    @property
    def brief(self) -> str:
        """The sign, and whether the values are exact, in one line."""
        return f"{SHORT}. {IN_SHORT}" if self.origin == BY_REPLAY else f"{SHORT}."

    @property
    def about(self) -> dict[str, Any]:
        """What a result that is made from this one has too."""
        names = ("at", "caveats", "quality", "recording", "remedy")
        return {name: getattr(self, name) for name in names}

    def lines(self) -> tuple[str, ...]:
        """The most important numbers as lines, for `repr`."""
        return ()

    def numbers(self) -> dict[str, Any]:
        """The entries of `as_dict()` that are specific to this result."""
        values = {name: getattr(self, name) for name in self.shown}
        return {name: value() if callable(value) else value for name, value in values.items()}

    def table(self) -> Mapping[str, Any]:
        """Columns of `to_pandas()`."""
        raise NotImplementedError

    def preview(self) -> Mapping[str, Any]:
        """Columns of the table that a notebook shows."""
        return self.table()

    def drawings(self) -> dict[str, figures.Figure]:
        """Its figures by name, as Plotly's own JSON; the first is the main one."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: what is not a finite number is None."""
        common = {"at": self.at, "sign": self.sign, "unit": self.unit, "origin": self.origin, "caveats": self.caveats}
        common |= {"quality": self.quality, "recording": self.recording, "to_exact": self.to_exact}
        out: dict[str, Any] = plain({**self.numbers(), "headline": self.headline, "words": self.words, **common})
        return out

    def to_pandas(self) -> Any:
        """A DataFrame."""
        return frame(self.table())

    def draw(self, name: str | None = None) -> figures.Figure:
        """One of its figures (the first) as Plotly's own JSON, in the colours that a page names."""
        drawn = self.drawings()
        if not drawn:
            raise UsageError("this result has no figures.")
        if name is not None and name not in drawn:
            raise UsageError(f"this result has no figure {name!r}. It has: {', '.join(drawn)}.")
        return drawn[next(iter(drawn)) if name is None else name]

    def figure(self, name: str | None = None) -> Any:
        """The same as a Plotly figure, in plain colours."""
        return figures.to_plotly(self.draw(name))

    def __repr__(self) -> str:
        return "\n  ".join((self.title, *self.lines(), *self.words, *self.remarks))

    def _repr_html_(self) -> str | None:
        try:
            table = frame(self.preview())
        except BackstoryError:  # pandas is not there: the notebook prints plain words
            return None
        return show_table(self.title, table, (*self.words, *self.remarks))


def frame(columns: Mapping[str, Any]) -> Any:
    """A pandas DataFrame."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UnsupportedError("to_pandas() needs pandas: pip install '.[pandas]' in the checkout.") from error
    return pd.DataFrame(columns)


def show_table(title: str, table: Any, remarks: Sequence[str] = ()) -> str:
    """A DataFrame's first rows under a heading, and remarks below, as notebooks show them; every text is escaped."""
    rows = table.head(ROWS).to_html(
        index=False, escape=True, border=0, justify="left", float_format=lambda x: f"{x:+.4g}"
    )
    more = f"<p>{ROWS} of {len(table):,} rows shown; .to_pandas() has all.</p>" if len(table) > ROWS else ""
    items = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    return f"<div><p><strong>{html.escape(title)}</strong></p>{rows}{more}<ul>{items}</ul></div>"
