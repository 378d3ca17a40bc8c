"""Groups of occurrences, for means over them: by when samples were first used, by step, by source or label, or by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..capture.ids import as_text
from ..errors import UsageError
from ..results.influence import column_of
from ..run.run import Run

THIRDS = ("early", "middle", "late")
COLUMNS = ("source", "label")
OTHERS = "(others)"
Ids = Mapping[str, Iterable[int | str]]
Texts = NDArray[np.str_]


def grouped(run: Run, by: str | Ids) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """`(names, group of each occurrence of the run (N,))`; samples that are in no named group are `OTHERS`."""
    samples, steps = run.occurrences()
    if not isinstance(by, str):
        return _named(samples, by)
    if by == "thirds":
        return THIRDS, _thirds(samples, steps)
    if by == "steps":
        return THIRDS, np.minimum(2, 3 * steps // run.n_steps)
    if by not in COLUMNS:
        raise UsageError(
            f"by must be 'thirds', 'steps', {', '.join(map(repr, COLUMNS))} or a dict from names to ids, got {by!r}."
        )
    labels = column(run, samples, by)
    names, inverse = np.unique(labels, return_inverse=True)
    return tuple(names.tolist()), inverse


def column(run: Run, samples: Texts, by: str) -> Texts:
    """The source or label of each of these samples."""
    names, inverse = np.unique(samples, return_inverse=True)
    return column_of(names.tolist(), by, run.content)[inverse]


def _thirds(samples: Texts, steps: Any) -> NDArray[np.int64]:
    """Samples in the order of their first use, cut into three groups of equal size."""
    _, first, inverse = np.unique(samples, return_index=True, return_inverse=True)  # rows are in time order
    order = np.argsort(np.argsort(first))
    return (3 * order // len(first))[inverse]


def _named(samples: Texts, by: Ids) -> tuple[tuple[str, ...], NDArray[np.int64]]:
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
