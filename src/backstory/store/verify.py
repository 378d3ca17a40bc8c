"""Integrity check of a run: is every committed number still what was written?"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TypeVar

import numpy as np
from torch import Tensor

from ..errors import StoreError
from .codec import SUMMED, checksum, tensor
from .schema import StepTable
from .tables import Table

T = TypeVar("T")
Span = tuple[int, int]  # from step, to step
Diagonal = Callable[[int, int], Tensor | None]  # P of steps lo to hi


def check_steps(steps: StepTable, n_rows_on_disk: int) -> Iterator[str]:
    """Sentences about steps that do not follow each other, or whose rows are missing."""
    expected = np.cumsum(np.concatenate([[0], steps.rows[:-1]])) if len(steps.rows) else steps.rows
    for t, (step, start) in enumerate(zip(steps.step, steps.row_start, strict=True)):
        if step != t:
            yield f"row {t} of steps is step {step}, expected step {t}."
        elif start != expected[t]:
            yield f"the rows of step {t} start at {start}, expected {expected[t]}."
    for t in np.flatnonzero(steps.row_start + steps.rows > n_rows_on_disk).tolist():
        yield f"step {t} should have {steps.rows[t]} rows, but the rows table ends before them."


def check_rows(steps: StepTable, rows: Table, spans: Iterable[Span], diagonal: Diagonal) -> Iterator[str]:
    """Sentences about steps whose rows are not those that were written, some steps (from, to) read at once."""
    for lo, hi in spans:
        try:
            yield from _check_span(steps, rows, lo, hi, diagonal)
        except StoreError as error:
            if hi - lo == 1:
                yield f"step {lo} cannot be read: {error}"
            else:  # find the steps that can
                yield from check_rows(steps, rows, pairwise(range(lo, hi + 1)), diagonal)


def _check_span(steps: StepTable, rows: Table, lo: int, hi: int, diagonal: Diagonal) -> Iterator[str]:
    first, last = int(steps.row_start[lo]), int(steps.row_start[hi - 1] + steps.rows[hi - 1])
    table = rows.table(rows.schema.names, first, last)
    parts = [tensor(table[name]).numpy() for name in SUMMED if name in table.column_names]
    step, pos = table["step"].to_numpy(), table["pos"].to_numpy()
    P = diagonal(lo, hi)
    for t in range(lo, hi):
        a, b = int(steps.row_start[t]) - first, int(steps.row_start[t] + steps.rows[t]) - first
        if not np.array_equal(step[a:b], np.full(b - a, t)) or not np.array_equal(pos[a:b], np.arange(b - a)):
            yield f"step {t}: its rows have wrong steps or positions, expected positions 0 to {b - a - 1} of step {t}."
            continue
        columns = [*(part[a:b] for part in parts), *([] if P is None else [P[t - lo].numpy()])]
        if checksum(columns, table["sample"][a:b].to_pylist()) != steps.crc[t]:
            yield f"step {t}: its rows have changed since they were written (checksum mismatch)."


def check_embedding(which: str, of: tuple[int, int], embedding: Table, rows: Table) -> Iterator[str]:
    """Sentences about an embedding that is not aligned with the rows `of` (from, to)."""
    try:
        if (n := embedding.count()) != of[1] - of[0]:
            yield f"the embedding {which} has {n} rows, expected {of[1] - of[0]}."
            return
        for name in ("step", "pos"):
            if not embedding.table([name]).equals(rows.table([name], *of)):
                yield f"the embedding {which} is not aligned with the rows: column {name} differs."
    except StoreError as error:
        yield f"the embedding {which} cannot be read: {error}"


def check_readable(load: Callable[[T], object], names: Iterable[T]) -> Iterator[str]:
    """Sentences about tensor files that cannot be read."""
    for name in names:
        try:
            load(name)
        except StoreError as error:
            yield str(error)
