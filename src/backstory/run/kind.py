"""Of which kind a result is: on one query, or on the mean of several. Quality is measured on each kind by itself.

Several losses are several queries. One loss is one query, however many rows of its batch it sums or averages: they may be pieces of one
text. It is the mean of several where the rows are known to be queries: where the batch is a query set of the run or of its recipe, or
the one that was calibrated.
"""

from collections.abc import Mapping
from typing import Any

from ..capture.fingerprint import batch_fingerprint
from ..store import RunStore
from .calibrate import read_calibration
from .lookup import count_queries
from .remedy import name_queries


def is_mean(store: RunStore, sets: Mapping[str, Any], batch: Any, losses: int, at: int) -> bool:
    """Whether a result on so many losses of a batch, taken together, is on the mean of several queries."""
    if losses > 1 or count_queries(batch) < 2:
        return losses > 1
    if name_queries(sets, batch) is not None:  # of more than one row: a whole set
        return True
    made = read_calibration(store, at)
    return made is not None and made.batch == batch_fingerprint(batch)
