"""Which sample was used at which step: the labels of a run's rows."""

from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from ..store import RunStore

ROWS_AT_ONCE = 1 << 16  # read when only ids and steps are wanted
Labels = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # ids as text, steps


def rows_before(store: RunStore, step: int) -> int:
    """How many rows the steps before `step` have."""
    table = store.steps(step - 1, step)
    return int(table.row_start[0]) + int(table.rows[0])


def occurrences(store: RunStore, n_rows: int) -> Labels:
    """Ids and steps of all rows, (N,) each; in pieces, for a Python string takes more room than its letters."""
    cuts = range(0, max(1, n_rows), ROWS_AT_ONCE)
    blocks = (store.read(lo, min(n_rows, lo + ROWS_AT_ONCE), rows=False, samples=True) for lo in cuts)
    samples, steps = zip(*((np.array(b.samples), b.step.numpy()) for b in blocks), strict=True)
    return np.concatenate(samples), np.concatenate(steps)


def picked(store: RunStore, rows: Tensor) -> Labels:
    """Ids and steps of chosen rows, (Q, M) each."""
    found: dict[int, tuple[str, int]] = {}
    for lo, wanted in groupby(sorted(set(rows.reshape(-1).tolist())), lambda row: row - row % ROWS_AT_ONCE):
        block = store.read(lo, min(lo + ROWS_AT_ONCE, store.n_rows()), rows=False, samples=True)
        assert block.samples is not None
        found |= {row: (block.samples[row - lo], int(block.step[row - lo])) for row in wanted}
    samples = [[found[r][0] for r in line] for line in rows.tolist()]
    steps = [[found[r][1] for r in line] for line in rows.tolist()]
    return np.array(samples), np.array(steps)
