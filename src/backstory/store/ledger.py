"""The steps and rows of a run: created, opened, appended to, read forward and backward.

A step exists when `steps` says so: its rows are committed first, then its line in `steps`. Rows beyond
the committed steps are ignored by readers and removed by the next writer.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import DiskError, StoreError, UsageError
from ..maths import encoding as enc
from ..maths.encoding import Block, parts
from . import codec, files, layout, tables
from .lock import RunLock
from .records import RowBlock, StepRecord, StepTable, check_record, rows_schema, samples_schema, steps_schema

FRAGMENT = 256 << 20  # bytes of rows in one compacted fragment
TIDY_EVERY = 500  # commits


class Ledger:
    """The steps and rows of an open run, and its config; `RunStore` adds what lies beside them."""

    def __init__(self, path: Path, lock: RunLock | None) -> None:
        self.path = path
        self.config = layout.read_config(path)
        self.messages: list[str] = []
        self._lock = lock
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._commits = 0
        self._rows, self._steps, self._samples = (self._table(name) for name in ("rows", "steps", "samples"))
        self._committed = self._tail()
        if lock is not None:
            self._repair()

    def _table(self, name: str) -> tables.Table:
        table = tables.Table(self.path / f"{name}.lance", write=self._lock is not None)
        if table.message:
            self.messages.append(table.message)
        return table

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        layers: Sequence[tuple[str, int]],
        encoding: str,
        n_groups: int,
        config: Mapping[str, Any],
        curvature_rows: int = 0,
        split: bool = False,
        diagonal: bool = False,
        factors: Sequence[tuple[int, int] | None] | None = None,
    ) -> Self:
        """A new run, open for writing; it becomes a run with its last file, `config.json`.

        A layer with `factors` (m, n) has rows of m n numbers that are outer products, and are kept as their two factors.
        """
        folder = Path(path)
        contents = layout.new_config(layers, encoding, n_groups, config, curvature_rows, split, diagonal, factors)
        layout.check_free(folder)
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
        try:
            layout.check_free(folder)
            layout.clear_half_created(folder)
            blocks, width = layout.kept_blocks(contents), sum(p for _, p in layers)
            tables.create(folder / "rows.lance", rows_schema(blocks, encoding, curvature_rows, split))
            tables.create(folder / "steps.lance", steps_schema(n_groups, width if diagonal else 0))
            tables.create(folder / "samples.lance", samples_schema())
            files.write_json(folder / "config.json", contents)
            files.fsync(folder.absolute().parent)
            return cls(folder, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: str | Path, *, write: bool = False) -> Self:
        """An existing run, for reading or (with its lock) for writing."""
        folder = Path(path)
        layout.read_config(folder)
        lock = RunLock(folder) if write else None
        try:
            return cls(folder, lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(compact=kind is None)

    def close(self, compact: bool = True) -> None:
        """Tidy up (when writing) and release the lock; safe to call twice."""
        if self._lock is None or not self._lock.held:
            return
        with self._mutex:
            try:
                if compact:
                    self._tidy()
            except StoreError as error:
                self.messages.append(f"the run is whole, but was not compacted: {error}")
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        self._rows.compact(max(1024, FRAGMENT // self.bytes_per_row), least=8)
        self._steps.compact(1 << 20)
        self._samples.compact(1 << 20, least=8)
        for table in (self._rows, self._steps, self._samples):
            table.cleanup()

    def _writable(self) -> None:
        if self._lock is None:
            raise UsageError(f"{self.path} is open for reading only. Open it with `write=True` to change it.")
        if not self._lock.held:
            raise UsageError(f"{self.path} is closed, or was opened before a fork. Open it again to change it.")

    def read_config(self) -> dict[str, Any]:
        """`config.json` as it is now: another process may be recording."""
        if self._lock is None:
            self.config = layout.read_config(self.path)
        return self.config

    def update_config(self, **changes: Any) -> None:
        """Replace entries of `config.json`, all or nothing."""
        self._writable()
        if fixed := [key for key in layout.FIXED if key in changes]:
            raise UsageError(f"{fixed} cannot change in a run that exists. Record a new run instead.")
        with self._mutex:
            new = {**self.config, **changes}
            files.write_json(self.path / "config.json", new)
            self.config = new

    def relayout(self, dims: Sequence[int], *, narrower: bool = False, **changes: Any) -> None:
        """Share the numbers of a row out among the layers anew, with other entries of the config; before any row.

        With `narrower`, a row may have fewer of them: the empty table is made anew before the config says so.
        """
        self._writable()
        fits = sum(dims) == self.width or (narrower and sum(dims) < self.width and not self.config["diagonal"])
        if self.n_steps() or not fits or len(dims) != len(self.dims):
            raise StoreError(
                f"found {self.n_steps()} steps and a layout of {sum(dims)} numbers in {len(dims)} layers; expected no "
                f"steps and {self.width} in {len(self.dims)}. The layout of a run is fixed with its first row."
            )
        names = [layer["name"] for layer in self.config["layers"]]
        with self._mutex:
            if sum(dims) != self.width:
                schema = rows_schema(dims, self.config["encoding"], self.curvature_rows, self.split)
                tables.commit_overwrite(self.path / "rows.lance", schema, [])
                self._rows = self._table("rows")
            new = {**self.config, "layers": layout.layer_table(list(zip(names, dims, strict=True))), **changes}
            files.write_json(self.path / "config.json", new)
            self.config = new

    def keep_factors(self, factors: Sequence[tuple[int, int] | None]) -> None:
        """Which layers' rows are outer products (m, n), kept as their two factors; before any row.

        The empty table is made anew before the config says so.
        """
        self._writable()
        if self.n_steps():
            raise StoreError(f"found {self.n_steps()} steps; expected none. How rows are kept is fixed with the first.")
        with self._mutex:
            new = layout.with_factors(self.config, factors)
            schema = rows_schema(layout.kept_blocks(new), new["encoding"], self.curvature_rows, self.split)
            if schema != self._rows.schema:
                tables.commit_overwrite(self.path / "rows.lance", schema, [])
                self._rows = self._table("rows")
            if new != self.config:
                files.write_json(self.path / "config.json", new)
                self.config = new

    @property
    def dims(self) -> list[int]:
        """Numbers per layer."""
        return [int(layer["dims"]) for layer in self.config["layers"]]

    @property
    def blocks(self) -> list[Block]:
        """Numbers per layer, or a pair where its rows are kept as two factors."""
        return layout.kept_blocks(self.config)

    @property
    def width(self) -> int:
        """Numbers in a row, Σp."""
        return sum(self.dims)

    @property
    def bytes_per_row(self) -> int:
        """What one row costs on disk, about."""
        kept = parts(self.blocks)
        scales = 4 * len(kept) if self.config["encoding"] in enc.SCALED else 0
        vector = sum(kept) * enc.DTYPES[self.config["encoding"]].itemsize + scales
        return vector * (self.curvature_rows + (not self.split)) + 16 * self.curvature_rows + 48

    @property
    def curvature_rows(self) -> int:
        """How many curvature rows each occurrence has beside its gradient row."""
        return int(self.config["curvature_rows"])

    @property
    def split(self) -> bool:
        """Whether the gradient row is the sum of the curvature rows, and not kept apart."""
        return bool(self.config["split"])

    # steps and rows

    def _tail(self) -> tuple[int, int]:
        """`(steps, rows)` that are committed and whole, read from the disk."""
        self._steps.refresh()
        self._rows.refresh()
        n, on_disk = self._steps.count(), self._rows.count()
        while n:
            last = self._steps.table(["row_start", "rows"], n - 1, n).to_pylist()[0]
            if (end := last["row_start"] + last["rows"]) <= on_disk:
                return n, end
            n -= 1
        return 0, 0

    def _repair(self) -> None:
        """Drop what an interrupted writer, or a lost manifest, left half done."""
        n, _ = self._committed
        if self._steps.delete(f"step >= {n}"):
            self.messages.append(f"steps from {n} on have lost their rows and were dropped; the run ends at step {n}.")
        self._drop_orphans()

    def _drop_orphans(self) -> None:
        n, rows = self._committed
        if self._rows.count() != rows:
            self._rows.delete(f"step >= {n}")

    def _sizes(self) -> tuple[int, int]:
        if self._lock is None:
            empty, self._committed = not self._committed[0], self._tail()
            if empty:
                self.config = layout.read_config(self.path)  # the layout of a row is settled just before the first one
        return self._committed

    def n_steps(self) -> int:
        """Committed steps; they are 0 to n − 1."""
        return self._sizes()[0]

    def n_rows(self) -> int:
        """Rows of the committed steps."""
        return self._sizes()[1]

    def append(self, records: Sequence[StepRecord]) -> None:
        """Commit the next steps, durably."""
        self._writable()
        with self._mutex:
            n, start = self._committed
            for expected, record in enumerate(records, n):
                if record.step != expected:
                    raise StoreError(
                        f"step {record.step} cannot follow {expected} committed steps; expected step "
                        f"{expected}. Truncate the run to the step at which training goes on."
                    )
                check_record(record, self.width, self.config["groups"], self.curvature_rows, self.config["diagonal"])
            if records:
                self._append(list(records), n, start)

    def _append(self, records: list[StepRecord], n: int, start: int) -> None:
        try:
            self._drop_orphans()
            rows, crcs = codec.rows_table(
                records, self.blocks, self.config["encoding"], self.curvature_rows, self.split
            )
            if len(rows):
                self._rows.append(rows)
            self._steps.append(codec.steps_table(records, start, crcs, self.config["groups"]))
        except DiskError as error:
            size = len(records[0].samples) * self.bytes_per_row
            raise DiskError(
                f"the disk under {self.path} is full: {n} steps are kept, steps {n} to "
                f"{n + len(records) - 1} are not. Free some space (a step takes about {size} bytes), then "
                "resume the run."
            ) from error
        self._committed = (n + len(records), start + len(rows))
        self._commits += 1
        if self._commits % TIDY_EVERY == 0:
            self._tidy()

    def steps(self, lo: int = 0, hi: int | None = None) -> StepTable:
        """The committed steps `lo` to `hi`."""
        n = self.n_steps()
        hi = n if hi is None else hi
        self._within(lo, hi, n, "steps")
        return codec.read_steps(self._steps, lo, hi)

    def diagonal(self, lo: int, hi: int) -> Tensor | None:
        """The optimizer's diagonal P of steps `lo` to `hi`, (T, Σp), where it is kept."""
        self._within(lo, hi, self.n_steps(), "steps")
        return codec.read_diagonal(self._steps, lo, hi)

    def _within(self, lo: int, hi: int, n: int, what: str) -> None:
        if not 0 <= lo <= hi <= n:
            raise UsageError(f"{what} {lo} to {hi} were asked of {self.path}, which has {n} {what}. Ask within these.")

    def read(
        self,
        lo_row: int,
        hi_row: int,
        *,
        rows: bool = True,
        samples: bool = False,
        dtype: torch.dtype = torch.float32,
        curvature: bool = False,
    ) -> RowBlock:
        """Rows `lo_row` to `hi_row` by position."""
        if hi_row > self._committed[1]:
            self._sizes()
        self._within(lo_row, hi_row, self._committed[1], "rows")
        return codec.read_block(
            self._rows, self.blocks, lo_row, hi_row, rows=rows, samples=samples, dtype=dtype, curvature=curvature
        )

    def backward(
        self,
        hi_step: int,
        *,
        dtype: torch.dtype,
        chunk_bytes: int = 8 << 20,
        lo_step: int = 0,
        samples: bool = False,
        curvature: bool = True,
        multiple: int = 1,
    ) -> Iterator[RowBlock]:
        """The rows of steps `lo_step` to `hi_step` in chunks of whole steps, the latest chunk first.

        A chunk has room for a `multiple` of so many rows, where there is room for more than one.
        """
        steps = self.steps(lo_step, hi_step)
        copies = 1 + (self.curvature_rows if curvature or self.split else 0)
        most = max(1, chunk_bytes // (self.width * dtype.itemsize * copies))
        most -= most % multiple if most > multiple else 0
        ends = (steps.row_start + steps.rows).tolist()
        starts = steps.row_start.tolist()
        hi = len(starts)
        while hi:
            lo = hi - 1
            while lo and ends[hi - 1] - starts[lo - 1] <= most:
                lo -= 1
            yield self.read(starts[lo], ends[hi - 1], samples=samples, dtype=dtype, curvature=curvature)
            hi = lo

    def rows_before(self, at: int) -> int:
        """How many rows there are before step `at`."""
        self._within(0, at, self.n_steps(), "steps")
        steps = self.steps(at - 1, at) if at else None
        return int(steps.row_start[0] + steps.rows[0]) if steps else 0

    def _cut(self, step: int) -> None:
        """Drop the steps from `step` on."""
        self._steps.delete(f"step >= {step}")
        self._committed = self._tail()
        self._drop_orphans()
