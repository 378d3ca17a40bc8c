"""Sentences that describe numbers, and words that two texts have in common."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .sign import verb

WORD = re.compile(r"\w+")
METHODS = {"adjoint": "reverse sweep", "embeddings": "stored embeddings", "segments": "embedded segments"}
SHORTEST = 4  # letters: shorter words are in almost any two texts
SAME = 0.05  # of the larger of two influences: a smaller change is none
LATE = 10  # one part in so many is the end of training


def signed(influence: float) -> str:
    """An influence with its sign, to three digits; a dash for what is not a number."""
    return "–" if influence != influence else f"{influence:+#.3g}".removesuffix(".")


def first_words(text: str | None, most: int) -> str:
    """The beginning of a text on one line, without anything that a terminal acts on."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text or "").split())
    return words if len(words) <= most else words[: most - 1] + "…"


def describe_change(values: Sequence[float | None]) -> str:
    """How an influence went from checkpoint to checkpoint; None where it was not there yet."""
    known = [x for x in values if x is not None]
    if not known:
        return "It was not used before any of these checkpoints."
    if len(known) == 1 and len(values) == 1:
        return f"It {verb(known[0])}. Only one checkpoint is stored: record with checkpoints=K to see changes."
    if len(known) == 1:
        return f"It was first used just before the last checkpoint, where it {verb(known[0])}."
    first, last = known[0], known[-1]
    if abs(last - first) <= SAME * max(abs(first), abs(last)):
        return f"Its influence hardly changed: it {verb(last)}."
    if first * last < 0:
        return (
            f"Its sign flipped: at first it {verb(first)}, in the end it {verb(last)}. Later samples changed its "
            "effect."
        )
    kind = "help" if first + last > 0 else "harm"
    if abs(last) > abs(first):
        return f"Its {kind} grew, through more uses or because later samples built on it."
    why = "overwrote its effect" if kind == "help" else "made up for it"
    return f"Its {kind} shrank: later samples {why}, or the queries became easy."


def describe_signs(values: Sequence[float]) -> str:
    """How many of a sample's uses helped and hurt."""
    if len(values) == 1:
        return f"It {verb(values[0])}."
    return f"{sum(x > 0 for x in values)} of {len(values)} helped, {sum(x < 0 for x in values)} hurt."


def name_method(method: str) -> str:
    """How a result was computed, as people read it; a baseline has its own name."""
    return METHODS.get(method, method)


def describe_duration(seconds: float) -> str:
    """A time to wait, in the unit that people would use; never less than a second."""
    unit, size = next((x for x in (("hour", 3600), ("minute", 60)) if seconds >= x[1]), ("second", 1))
    count = max(1, round(seconds / size))
    return f"{count:,} {unit}{'s' * (count > 1)}"


def command_on(run: str | Path, verb: str, *words: str) -> str:
    """A command on a run as a person would type it, quoted for a shell; the run's path from the working directory, where it lies there."""
    path, here = Path(run), Path.cwd()
    shown = path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
    return shlex.join(["backstory", verb, f"./{shown}" if str(shown).startswith("-") else str(shown), *words])


def late_from(at: int) -> int:
    """The first step of the last tenth of the steps before `at`: nothing much came after to overwrite what was used there."""
    return at - max(1, at // LATE)


def name_label(name: str, by: str = "label") -> str:
    """A label that is a bare number with the word before it; any other name as it is."""
    return f"label {name}" if by == "label" and re.fullmatch(r"-?\d+(\.\d+)?", name) else name


class Piece(NamedTuple):
    """A part of a text; all parts together are the text."""

    text: str
    common: bool


def common_words(text: str, query: str, shortest: int = SHORTEST) -> set[str]:
    """Words of at least `shortest` letters in both texts, whatever their case."""
    here, there = ({w.casefold() for w in WORD.findall(x)} for x in (text, query))
    return {w for w in here & there if len(w) >= shortest}


def mark_words(text: str, common: set[str]) -> list[Piece]:
    """The text in pieces, the words in common marked."""
    return [Piece(part, part.casefold() in common) for part in re.split(f"({WORD.pattern})", text) if part]
