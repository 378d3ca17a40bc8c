"""Groups of occurrences: the one grammar in which insights, retraining and tangents are told what to put together.

    "source", "label"     by what is stored of the samples
    "epoch"               the first use of every sample, the second, …
    "parts:K"             K equal parts of the run, by step
    "thirds"              samples by their first use: early, middle, late
    "steps"               occurrences by step: early, middle, late
    "source,parts:8"      every combination that occurs
    {name: ids}           samples by name; all others are `OTHERS`

Shapes:  N occurrences of the run, in the order of training.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..capture.ids import as_text
from ..errors import UsageError
from ..replay.tape import Places
from ..results.influence import column_of

if TYPE_CHECKING:
    from .run import Run

THIRDS = ("early", "middle", "late")
COLUMNS = ("source", "label")
PARTS = "parts:"
OTHERS = "(others)"
KNOWN = ("'thirds'", "'steps'", "'source'", "'label'", "'epoch'", "'parts:K'")
Ids = Mapping[str, Iterable[int | str]]
By = str | Ids
Texts = NDArray[np.str_]
Ints = NDArray[np.int64]


class Groups(NamedTuple):
    """Which group each occurrence is in."""

    names: tuple[str, ...]
    of: Ints  # (N,) numbers of groups
    by: tuple[str, ...]  # what was combined
    keys: tuple[tuple[str, ...], ...]  # of each group, its value of each of `by`


def grouped(run: "Run", by: By) -> Groups:
    """The groups of a run's occurrences; samples that are in no named group are `OTHERS`."""
    samples, steps = run.occurrences()
    if not isinstance(by, str):
        names, of = _named(samples, by)
        return Groups(names, of, ("group",), tuple((x,) for x in names))
    axes = [x.strip() for x in by.split(",")]
    if len(set(axes)) < len(axes):
        raise UsageError(f"groups are combined of different things, got {by!r}.")
    each = [_axis(run, axis, samples, steps) for axis in axes]
    return _crossed(tuple(axes), each)


def is_time(by: str) -> bool:
    """Whether a word of the grammar says when samples were used, not what they are."""
    return by.strip() not in COLUMNS


def _axis(run: "Run", by: str, samples: Texts, steps: Ints) -> tuple[Sequence[str], Ints]:
    """`(names, group of each occurrence)` for one word of the grammar."""
    if by == "thirds":
        return THIRDS, _thirds(samples)
    if by == "steps":
        return THIRDS, np.minimum(2, 3 * steps // run.n_steps)
    if by == "epoch":
        uses = _uses(samples)
        return [f"epoch {k + 1}" for k in range(int(uses.max(initial=0)) + 1)], uses
    if by.startswith(PARTS):
        return _parts(by, steps, run.n_steps)
    if by not in COLUMNS:
        raise UsageError(
            f"by must be {', '.join(KNOWN)}, several with commas, or a dict from names to ids, got {by!r}."
        )
    names, inverse = np.unique(column(run, samples, by), return_inverse=True)
    return names.tolist(), inverse


def _crossed(by: tuple[str, ...], axes: Sequence[tuple[Sequence[str], Ints]]) -> Groups:
    """Every combination that occurs, the first axis slowest; of one axis all of its groups."""
    if len(axes) == 1:
        ((names, of),) = axes
        return Groups(tuple(names), of, by, tuple((x,) for x in names))
    sizes = [len(names) for names, _ in axes]
    present, of = np.unique(np.ravel_multi_index([of for _, of in axes], sizes), return_inverse=True)
    places = np.stack(np.unravel_index(present, sizes), 1).tolist()
    keys = tuple(tuple(names[k] for (names, _), k in zip(axes, place, strict=True)) for place in places)
    return Groups(tuple(", ".join(key) for key in keys), of, by, keys)


def column(run: "Run", samples: Texts, by: str) -> Texts:
    """The source or label of each of these samples."""
    names, inverse = np.unique(samples, return_inverse=True)
    return column_of(names.tolist(), by, run.content)[inverse]


def _thirds(samples: Texts) -> Ints:
    """Samples in the order of their first use, cut into three groups of equal size."""
    _, first, inverse = np.unique(samples, return_index=True, return_inverse=True)  # rows are in time order
    order = np.argsort(np.argsort(first))
    return (3 * order // len(first))[inverse]


def _uses(samples: Texts) -> Ints:
    """How often each occurrence's sample had been used before it."""
    _, inverse, counts = np.unique(samples, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")  # in time order inside each sample
    before = np.empty(len(samples), np.int64)
    before[order] = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
    return before


def _parts(by: str, steps: Ints, n_steps: int) -> tuple[Sequence[str], Ints]:
    number = by.removeprefix(PARTS)
    if not number.isdecimal() or not 1 <= int(number) <= n_steps:
        raise UsageError(f"parts:K cuts the {n_steps} steps of the run into K parts, 1 to {n_steps}, got {by!r}.")
    ends = [k * n_steps // int(number) for k in range(int(number) + 1)]
    names = [f"steps {a}–{b - 1}" for a, b in pairwise(ends)]
    return names, np.searchsorted(ends[1:], steps, side="right")


def _named(samples: Texts, by: Ids) -> tuple[tuple[str, ...], Ints]:
    wanted: dict[str, Sequence[str]] = {name: as_text(ids)[0] for name, ids in by.items()}
    every = [x for ids in wanted.values() for x in ids]
    if not every or len(set(every)) < len(every):
        raise UsageError("groups must have at least one sample, and no sample may be in two groups.")
    present, inverse = np.unique(samples, return_inverse=True)
    if unknown := set(every) - set(present.tolist()):
        raise UsageError(
            f"{len(unknown)} of the samples, such as {min(unknown)!r}, are not in the run. Leave them out."
        )
    numbers = np.full(len(present), len(wanted))
    for k, ids in enumerate(wanted.values()):
        numbers[np.searchsorted(present, ids)] = k
    return (*wanted, *([OTHERS] if (numbers == len(wanted)).any() else [])), numbers[inverse]


def places_of(steps: Ints, chosen: Any) -> Places:
    """Step -> positions in it, of the occurrences where `chosen` (N,) is true."""
    rows = np.flatnonzero(chosen)
    at = steps[rows]
    positions = rows - np.searchsorted(steps, at)  # rows are in the order of steps
    return {int(t): positions[at == t].tolist() for t in np.unique(at)}
