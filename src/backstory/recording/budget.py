"""The bytes that a recording may take: a plan that would not fit is refused before its first row.

Rows whose width the warm-up chooses (rank="auto:…") are counted once it has.
"""

import shutil

from ..errors import DiskError
from ..store import RunStore
from .settings import auto_rank


class Budget:
    """Counts what is recorded against the disk and `max_bytes`."""

    def __init__(self, store: RunStore, began: int, planned: int | None, max_bytes: int | None) -> None:
        self._store, self._began, self._planned, self._max_bytes = store, began, planned, max_bytes
        self._spent = store.size_bytes()
        self._waiting = 0  # rows that are not counted yet
        self._known = auto_rank(store.config["settings"]["rank"]) is None  # how wide a row is
        self._checked = False

    def spend(self, step: int, batch: int) -> None:
        """Before the rows of `step` are kept: would the planned run fit, and is there room for these?"""
        self._waiting += batch
        self._known = self._known or "basis" in self._store.tensor_names()
        if not self._known:
            return
        self._spent += self._waiting * self._store.bytes_per_row
        self._waiting = 0
        if self._max_bytes is not None and self._spent > self._max_bytes:
            raise DiskError(
                f"recording stopped before step {step}: the run would exceed max_bytes={self._max_bytes:,}. "
                f"The {step} steps before it are safe. Raise max_bytes, or lower rank= or encoding=."
            )
        if not self._checked and self._planned:
            self._check_plan(step, batch, self._planned)
        self._checked = True

    def _check_plan(self, step: int, batch: int, planned: int) -> None:
        need = batch * self._store.bytes_per_row * max(0, planned - step)
        free = shutil.disk_usage(self._store.path).free
        limit = free if self._max_bytes is None else min(free, self._max_bytes)
        if need > limit:
            raise DiskError(
                f"the plan of {planned} steps with {batch} samples needs about {need:,} bytes "
                f"({self._store.bytes_per_row:,} for each occurrence); there are {limit:,}. "
                + ("Nothing was recorded. " if step == self._began else f"The {step} steps before it are safe. ")
                + "Lower rank=, choose encoding='int8', or free the space."
            )
