"""Which sample was used at which step: the labels of a run's rows."""

from typing import Any

import numpy as np
import torch
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
    """Ids and steps of chosen rows, (Q, M) each, without reading any other."""
    known = rows.unique()
    samples, steps = store.labels(known.tolist())
    where = torch.searchsorted(known, rows).numpy()
    return np.array(samples)[where], np.array(steps)[where]
