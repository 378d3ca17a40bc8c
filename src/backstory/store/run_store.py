"""One run on disk: its steps, gradients and other files, with one writer at a time.

A step exists when `steps` says so: its rows are committed first, then its line in `steps`. Rows beyond
the committed steps are ignored by readers and removed by the next writer. Beside the rows lie embeddings, tensors (bases, checkpoints),
samples, the batches of the steps and the recipe that reads them, and the warm-up spool.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..errors import DiskError, StoreError, UsageError
from ..maths import encoding as enc
from ..maths.encoding import Block, parts
from ..maths.windows import Grid
from . import codec, files, layout, samples, tables, verify
from .batches import Batches
from .embeddings import Embeddings
from .files import RunLock, Spool
from .schema import (
    GROUP_KEYS,
    ROW_SCALARS,
    SAMPLE_COLUMNS,
    RowBlock,
    StepRecord,
    StepTable,
    check_record,
    rows_schema,
    samples_schema,
    steps_schema,
)
from .windows import Windows

FRAGMENT = 256 << 20  # bytes of rows in one compacted fragment
TIDY_EVERY = 500  # commits
LABELS_AT_ONCE = 1 << 16  # rows whose ids are read together
Labels = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # ids as text, steps
_CHECKPOINT = re.compile(r"(?:checkpoint|scale|state)-(\d+)")
_BEGUN = re.compile(
    r"config\.json|lock|(rows|steps|samples|batches)\.lance|spool|window|(basis|(checkpoint|scale|state)-\d+)\.safetensors"
)


class HasPath(Protocol):
    """Anything that is a run in a folder."""

    @property
    def path(self) -> Path:
        """Its folder."""


class RunStore:
    """An open run; make one with `create` or `open`, and close it (or use it as a context manager)."""

    def __init__(self, path: Path, lock: RunLock | None) -> None:
        self.path = path
        self.config = layout.read_config(path)
        self.messages: list[str] = []
        self._lock = lock
        self._mutex = threading.RLock()
        self._commits = 0
        self._rows, self._steps, self._samples = (self._table(name) for name in ("rows", "steps", "samples"))
        self._seen: tuple[tuple[int, int], tuple[int, int]] | None = None  # versions of the tables, and what they hold
        self._committed = self._tail()
        if lock is not None:
            self._repair()
        self.batches = Batches(path, self._writable, self._mutex)
        self.spool = Spool(path / "spool", self._writable, self.batches.commit)  # steps that wait for their projection
        self.windows = Windows(path, lambda: self.dims, self.config["encoding"], lambda: self.grid, self._writable)
        if lock is not None and self.has_windows:
            self.windows.truncate(self._committed[0], self._count_clipped)
        self._embeddings, self._segments = (
            Embeddings(path, lambda: self.dims, self._keys, kind) for kind in ("emb", "seg")
        )
        for tables_of in (self._embeddings, self._segments) if lock is not None else ():
            tables_of.drop_after(self.n_steps())
            tables_of.sweep()

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
        windows: bool = False,
        own: bool = False,
    ) -> Self:
        """A new run, open for writing; it becomes a run with its last file, `config.json`.

        A layer with `factors` (m, n) has rows of m n numbers that are outer products, and are kept as their two factors.
        With `windows`, steps share the curvature of their window; with `own`, occurrences keep what their gradients hold of theirs.
        """
        folder = Path(path)
        contents = layout.new_config(
            layers, encoding, n_groups, config, curvature_rows, split, diagonal, factors, windows, own
        )
        layout.check_free(folder)
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
        try:
            layout.check_free(folder)
            layout.clear_half_created(folder)
            blocks, width = layout.kept_blocks(contents), sum(p for _, p in layers)
            tables.create(folder / "rows.lance", rows_schema(blocks, encoding, curvature_rows, split, own))
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
        if self._lock is None or not self._lock.active:
            return
        with self._mutex:
            try:
                if compact:
                    self._tidy()
            except StoreError as error:
                self.messages.append(f"the run is complete, but was not compacted: {error}")
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        self._rows.compact(max(1024, FRAGMENT // self.bytes_per_row), least=8)
        self._steps.compact(1 << 20)
        self._samples.compact(1 << 20, least=8)
        self.batches.tidy()
        for table in (self._rows, self._steps, self._samples):
            table.cleanup()

    def _writable(self) -> None:
        if self._lock is None:
            raise UsageError(f"{self.path} is open read-only. Open it with `write=True` to change it.")
        if not self._lock.active:
            raise UsageError(f"{self.path} is closed, or was opened before a fork. Reopen it to change it.")

    def read_config(self) -> dict[str, Any]:
        """`config.json` as it is now: another process may be recording."""
        if self._lock is None:
            self.config = layout.read_config(self.path)
        return self.config

    def update_config(self, **changes: Any) -> None:
        """Replace entries of `config.json`, all or nothing."""
        self._writable()
        if fixed := [key for key in layout.FIXED if key in changes]:
            raise UsageError(f"{fixed} cannot be changed in an existing run. Record a new run instead.")
        with self._mutex:
            self._write_config({**self.config, **changes})

    def _write_config(self, new: dict[str, Any]) -> None:
        if new != self.config:
            files.write_json(self.path / "config.json", new)
            self.config = new

    def _settle(self, new: dict[str, Any]) -> None:
        """Another layout of rows, before there are any: the empty table is made anew before the config says so."""
        own = layout.OWN in new["features"]
        schema = rows_schema(layout.kept_blocks(new), new["encoding"], self.curvature_rows, self.split, own)
        with self._mutex:
            if schema != self._rows.schema:
                tables.commit_overwrite(self.path / "rows.lance", schema, [])
                self._rows = self._table("rows")
            self._write_config(new)

    def relayout(self, dims: Sequence[int], **changes: Any) -> None:
        """Share the numbers of a row out among the layers anew, as many or fewer, with other entries of the config; before any row."""
        self._writable()
        fits = sum(dims) == self.width or (sum(dims) < self.width and not self.config["diagonal"])
        if self.n_steps() or not fits or len(dims) != len(self.dims):
            raise StoreError(
                f"the layout of a run is fixed once it has steps: it must keep "
                f"{'' if self.config['diagonal'] else 'at most '}{self.width} coordinates in "
                f"{len(self.dims)} layers, got {sum(dims)} in {len(dims)}, with {self.n_steps()} steps recorded."
            )
        names = [layer["name"] for layer in self.config["layers"]]
        self._settle({**self.config, "layers": layout.layer_table(list(zip(names, dims, strict=True))), **changes})

    def keep_factors(self, factors: Sequence[tuple[int, int] | None]) -> None:
        """Which layers' rows are outer products (m, n), kept as their two factors; before any row."""
        self._writable()
        if self.n_steps():
            raise StoreError(
                f"how gradients are stored is fixed by the first step, and the run already has {self.n_steps()} steps."
            )
        self._settle(layout.with_factors(self.config, factors))

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
        vector = enc.row_bytes(parts(self.blocks), self.config["encoding"])
        return vector * (self.curvature_rows + (not self.split)) + 16 * self.curvature_rows + 48 + 8 * self.has_own

    @property
    def curvature_rows(self) -> int:
        """How many curvature rows each occurrence has beside its gradient row."""
        return int(self.config["curvature_rows"])

    @property
    def split(self) -> bool:
        """Whether the gradient row is the sum of the curvature rows, and not kept apart."""
        return bool(self.config["split"])

    @property
    def has_windows(self) -> bool:
        """Whether steps share the curvature of their window."""
        return layout.WINDOWS in self.config["features"]

    @property
    def grid(self) -> Grid | None:
        """Where windows begin and end; None where there are none, or none yet."""
        stored = self.config.get("windows")
        return None if stored is None else Grid.from_dict(stored)

    @property
    def has_own(self) -> bool:
        """Whether occurrences keep what their gradients hold of their curvature."""
        return layout.OWN in self.config["features"]

    def keep_windows(self, grid: Grid, *, own: bool = False) -> None:
        """Where windows begin and end, and what is kept of them and of occurrences; settled by the first step."""
        self._writable()
        if own and not self.has_own:
            self._settle(layout.with_own(self.config))
        self.update_config(windows=grid._asdict())

    def _count_clipped(self, lo: int, hi: int) -> int:
        return int((self.steps(lo, hi).clip < 1).sum())

    # steps and rows

    def _tail(self) -> tuple[int, int]:
        """`(steps, rows)` that are committed and whole, read from the disk where anything was committed since."""
        self._steps.refresh()
        self._rows.refresh()
        versions = self._steps.version, self._rows.version
        if self._seen is None or self._seen[0] != versions:
            self._seen = versions, self._whole()
        return self._seen[1]

    def _whole(self) -> tuple[int, int]:
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
            self.messages.append(
                f"steps from {n} on lost their gradients and were dropped; the run now ends at step {n}"
            )
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

    def step_of(self, at: int | str) -> int:
        """`at` as a step number: "final", or a step t, meaning the model before update t."""
        n = self.n_steps()
        if n == 0 and (waiting := len(self.spool.steps())):
            raise StoreError(
                f"the run has no complete step yet: {waiting} warm-up steps are waiting for their projection. Continue "
                f"recording with resume=True, start={waiting}, also to end it there, with no step inside the `with`."
            )
        if n == 0:
            raise StoreError("the run has no complete step yet: record at least one.")
        if at == "final":
            return n
        if not isinstance(at, int) or not 0 < at <= n:
            raise UsageError(f"at must be 'final' or a step from 1 to {n}, got {at!r}.")
        return at

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
                        f"expected step {expected} next, got step {record.step}. Truncate the run to the step from "
                        "which training continues."
                    )
                check_record(
                    record,
                    self.width,
                    self.config["groups"],
                    self.curvature_rows,
                    self.config["diagonal"],
                    self.has_own,
                )
            if records:
                self._append(list(records), n, start)

    def _append(self, records: list[StepRecord], n: int, start: int) -> None:
        try:
            self._drop_orphans()
            self.batches.commit(n + len(records))
            self.windows.spool(records)
            rows, crcs = codec.rows_table(
                records, self.blocks, self.config["encoding"], self.curvature_rows, self.split, self.has_own
            )
            if len(rows):
                self._rows.append(rows)
            self._steps.append(codec.steps_table(records, start, crcs, self.config["groups"]))
        except DiskError as error:
            size = len(records[0].samples) * self.bytes_per_row
            raise DiskError(
                f"the disk is full ({self.path}): steps before {n} are saved, steps {n} to {n + len(records) - 1} are "
                f"not. Free some space (a step takes about {size:,} bytes), then resume the run."
            ) from error
        self._committed = (n + len(records), start + len(rows))
        with suppress(DiskError):  # what waits is on the disk: a window can be closed later
            self.windows.settle(self._committed[0])
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

    def random_states(self, lo: int = 0, hi: int | None = None) -> dict[int, bytes]:
        """Step -> the packed random states before it, where something was drawn since the step before."""
        hi = self.n_steps() if hi is None else hi
        self._within(lo, hi, self.n_steps(), "steps")
        return codec.read_random(self._steps, lo, hi)

    def _within(self, lo: int, hi: int, n: int, what: str) -> None:
        if not 0 <= lo <= hi <= n:
            raise UsageError(f"{what} {lo} to {hi} are out of range: {self.path} has {n} {what}.")

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

    def chunks(
        self,
        hi_step: int,
        *,
        dtype: torch.dtype,
        chunk_bytes: int = 8 << 20,
        lo_step: int = 0,
        samples: bool = False,
        curvature: bool = True,
        multiple: int = 1,
        earliest_first: bool = False,
    ) -> Iterator[RowBlock]:
        """The rows of steps `lo_step` to `hi_step` in chunks of whole steps, the latest chunk first unless told otherwise.

        A chunk has room for a `multiple` of so many rows, where there is room for more than one.
        """
        steps = self.steps(lo_step, hi_step)
        copies = 1 + (self.curvature_rows if curvature or self.split else 0)
        most = max(1, chunk_bytes // (self.width * dtype.itemsize * copies))
        most -= most % multiple if most > multiple else 0
        for lo, hi in steps.spans(most)[:: -1 if earliest_first else 1]:
            first, last = int(steps.row_start[lo]), int(steps.row_start[hi - 1] + steps.rows[hi - 1])
            yield self.read(first, last, samples=samples, dtype=dtype, curvature=curvature)

    def rows_before(self, at: int) -> int:
        """How many rows there are before step `at`."""
        self._within(0, at, self.n_steps(), "steps")
        steps = self.steps(at - 1, at) if at else None
        return int(steps.row_start[0] + steps.rows[0]) if steps else 0

    def _keys(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        block = self.read(lo, hi, rows=False)
        return block.step, block.pos

    def truncate(self, step: int) -> None:
        """Drop the steps from `step` on, and the embeddings, checkpoints and spool that follow from them."""
        self._writable()
        with self._mutex:
            n = self._committed[0]
            if not 0 <= step <= n:
                raise UsageError(f"step must be between 0 and {n}, the number of steps in the run, got {step}.")
            self._embeddings.drop_after(step)
            self._segments.drop_after(step)
            self.drop_checkpoints_after(step)
            self.batches.truncate(step)
            self.spool.clear(step)
            self._steps.delete(f"step >= {step}")
            self._committed = self._tail()
            self._drop_orphans()
            if self.has_windows:
                self.windows.truncate(step, self._count_clipped)
                for tables_of in (self._embeddings, self._segments):  # made from a window that goes on
                    tables_of.drop_after(self.windows.ended())

    def drop_checkpoints_after(self, step: int) -> None:
        """Delete what was kept of the model and the optimizer at later steps."""
        for name in self.tensor_names():
            if (match := _CHECKPOINT.fullmatch(name)) and int(match[1]) > step:
                self.delete_tensors(name)

    @property
    def empty(self) -> bool:
        """Whether it has no step, not even a spooled or a damaged one, no sample, and nothing that recording did not put there."""
        others = any(not _BEGUN.fullmatch(path.name) for path in self.path.iterdir())
        return not (others or self.messages or self._steps.count() or self._samples.count() or self.spool.steps())

    def discard(self) -> None:
        """Delete the run if it is empty, but for what the next one in this folder replaces."""
        self._writable()
        if self.empty:
            for name in self.tensor_names():
                self.delete_tensors(name)
            files.remove(self.path / "config.json")

    # embeddings

    def write_embeddings(
        self, at: int, blocks: Iterable[tuple[int, Tensor]], settings: Mapping[str, Any], encoding: str = "float16"
    ) -> None:
        """Keep embeddings of all rows before step `at`, given as blocks `(row_start, E)`, last first."""
        self._writable()
        self._embeddings.write((at,), (0, self.rows_before(at)), blocks, settings, encoding)

    def embeddings(self) -> dict[int, dict[str, Any]]:
        """at -> settings of the complete embeddings."""
        n = self.n_steps()
        return {at: facts["settings"] for (at,), facts in self._embeddings.facts().items() if at <= n}

    def read_embeddings(self, at: int, lo_row: int, hi_row: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Embeddings of rows `lo_row` to `hi_row`, (n, Σp)."""
        return self._embeddings.read((at,), lo_row, hi_row, dtype)

    def occurrences(self, n_rows: int) -> Labels:
        """Ids and steps of the first rows, (n,) each; in pieces, for a Python string takes more room than its letters."""
        cuts = range(0, max(1, n_rows), LABELS_AT_ONCE)
        blocks = (self.read(lo, min(n_rows, lo + LABELS_AT_ONCE), rows=False, samples=True) for lo in cuts)
        ids, steps = zip(*((np.array(b.samples), b.step.numpy()) for b in blocks), strict=True)
        return np.concatenate(ids), np.concatenate(steps)

    def labels(self, rows: Tensor) -> Labels:
        """Ids and steps of chosen rows, in the shape of `rows`, without reading any other."""
        known = rows.unique()
        columns = self._rows.take(["sample", "step"], known.tolist())
        where = torch.searchsorted(known, rows).numpy()
        return np.array(columns["sample"].to_pylist())[where], columns["step"].to_numpy()[where]

    # segments: written by processes of their own, while one process holds the lock

    def write_segment(
        self,
        steps: tuple[int, int],
        blocks: Iterable[tuple[int, Tensor]],
        propagator: Callable[[], Mapping[str, Tensor]],
        settings: Mapping[str, Any],
        encoding: str,
    ) -> None:
        """Keep the embeddings of the rows of these steps, each of `settings["parts"]` vectors, and the segment's propagator."""
        rows = self.rows_before(steps[0]), self.rows_before(steps[1])
        self._segments.write(steps, rows, blocks, settings, encoding, propagator)

    def segments(self) -> dict[tuple[int, int], dict[str, Any]]:
        """(from, to) -> facts of the complete segments."""
        n = self.n_steps()
        return {(lo, hi): facts for (lo, hi), facts in self._segments.facts().items() if hi <= n}

    def read_segment(self, steps: tuple[int, int], lo: int, hi: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The `lo`-th to `hi`-th embedding of a segment, (n, parts · Σp)."""
        return self._segments.read(steps, lo, hi, dtype)

    def segment_propagator(self, steps: tuple[int, int]) -> dict[str, Tensor]:
        """The propagator that was kept with a segment."""
        return self._segments.propagator(steps)

    # tensors beside the tables

    def _file(self, name: str) -> Path:
        return self.path / f"{files.check_name(name)}.safetensors"

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Keep tensors as `<name>.safetensors`, durably, in the place of an older one."""
        self._writable()
        files.write_tensors(self._file(name), tensors, metadata)

    def adopt_tensors(self, file: Path) -> None:
        """Take a finished file of tensors into the run, under its own name."""
        self._writable()
        files.move(file, self._file(file.name.removesuffix(".safetensors")))

    def load_tensors(self, name: str, prefix: str = "") -> dict[str, Tensor]:
        """The tensors kept under `name`, or those of them whose names begin so."""
        return files.read_tensors(self._file(name), prefix)

    def tensor_metadata(self, name: str) -> dict[str, str]:
        """The text kept beside the tensors."""
        return files.read_metadata(self._file(name))

    def tensor_names(self) -> list[str]:
        """All names under which tensors are kept."""
        return sorted(path.name.removesuffix(".safetensors") for path in self.path.glob("*.safetensors"))

    def save_checkpoint(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the model's weights before update `step`."""
        self.save_tensors(f"checkpoint-{step:08d}", weights)

    def load_checkpoint(self, step: int) -> dict[str, Tensor]:
        """The model's weights before update `step`."""
        if step in (known := self.checkpoints()):
            return self.load_tensors(f"checkpoint-{step:08d}")
        reason = self.config.get("no_final_weights") if step == self.n_steps() else None
        raise StoreError(
            f"the run has no weights at step {step} ({reason or f'stored at steps {known}'}). Load your own copy of the "
            f"model at step {step} and pass it to query(), or record with steps=…, checkpoints=K to store more."
        )

    def checkpoints(self) -> list[int]:
        """Steps whose weights are kept."""
        return self._steps_of("checkpoint-")

    def save_state(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Keep what training has beside the weights before update `step`: the optimizer's state and the random states."""
        self.save_tensors(f"state-{step:08d}", state)

    def load_state(self, step: int) -> dict[str, Tensor]:
        """What `save_state` was given."""
        return self.load_tensors(f"state-{step:08d}")

    def restarts(self) -> list[int]:
        """Steps of the run from which training can start anew: weights and state are kept."""
        n, weights = self.n_steps(), set(self.checkpoints())
        return [step for step in self._steps_of("state-") if step in weights and step <= n]

    def _steps_of(self, prefix: str) -> list[int]:
        return sorted(int(n.removeprefix(prefix)) for n in self.tensor_names() if n.startswith(prefix))

    def query_sets(self) -> list[str]:
        """Names of the stored query sets."""
        return [n.removeprefix("queries-") for n in self.tensor_names() if n.startswith("queries-")]

    def put_queries(self, name: str, batch: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        """Store a query set under a name."""
        if isinstance(batch, Tensor):
            kind, tensors = "tensor", {"0": batch}
        elif isinstance(batch, Mapping):
            kind, tensors = "dict", dict(batch)
        else:
            kind, tensors = "tuple", {str(i): x for i, x in enumerate(batch)}
        self.save_tensors(f"queries-{name}", tensors, {"kind": kind})

    def queries(self, name: str) -> Any:
        """A stored query set, as it was given."""
        if name not in (names := self.query_sets()):
            raise UsageError(
                f"the run has no query set {name!r}. It has: {', '.join(names) or 'none'}. Add it with run.add_queries()."
            )
        tensors = self.load_tensors(f"queries-{name}")
        kind = self.tensor_metadata(f"queries-{name}")["kind"]
        if kind == "dict":
            return tensors
        values = tuple(tensors[k] for k in sorted(tensors, key=int))
        return values if kind == "tuple" else values[0]

    def delete_tensors(self, name: str) -> None:
        """Delete `<name>.safetensors`, if it is there."""
        self._writable()
        files.remove(self._file(name))

    # what a trainer's callback wrote of the training

    def put_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Keep what a training was made of as `recipe.json`."""
        self._writable()
        files.write_json(self.path / "recipe.json", recipe)

    def recipe(self) -> dict[str, Any] | None:
        """What `put_recipe` was given; None where there is none."""
        path = self.path / "recipe.json"
        return files.read_json(path) if path.exists() else None

    # samples

    def put_samples(
        self,
        ids: Sequence[str],
        *,
        text: Sequence[str | None] | None = None,
        image: Sequence[bytes | None] | None = None,
        label: Sequence[str | None] | None = None,
        source: Sequence[str | None] | None = None,
    ) -> None:
        """Keep what a person wants to see of samples; columns that are given replace those of the same id."""
        self._writable()
        with self._mutex:
            samples.put(self._samples, ids, {"text": text, "image": image, "label": label, "source": source})

    def samples(self, ids: Sequence[str] | None = None, columns: Sequence[str] = SAMPLE_COLUMNS[1:]) -> pa.Table:
        """The samples with these ids, in this order, or all; unknown ids are absent."""
        return samples.get(self._samples, ids, ("id", *columns))

    def erase_samples(self, ids: Sequence[str] | None) -> int:
        """Delete samples (None: all) so that their bytes leave the disk, and the batches that hold them too; how many samples."""
        self._writable()
        with self._mutex:
            self.batches.drop()
            return samples.erase(self._samples, ids)

    # the whole

    def verify(self) -> list[str]:
        """Read everything again; sentences about what is damaged, or none."""
        steps, on_disk = self.steps(), self._rows.count()
        damage = list(verify.check_steps(steps, on_disk))
        spans = reversed(steps.spans(codec.slab_rows(self.width, torch.float32)))
        damage += [] if damage else verify.check_rows(steps, self._rows, spans, self.diagonal)
        stored = [(f"at {at}", 0, at, self._embeddings.table((at,))) for at in self.embeddings()]
        stored += [(f"of steps {lo} to {hi}", lo, hi, self._segments.table((lo, hi))) for lo, hi in self.segments()]
        for which, lo, hi, table in stored:
            damage += verify.check_embedding(which, (self.rows_before(lo), self.rows_before(hi)), table, self._rows)
        damage += self.windows.damage(self.n_steps()) if self.has_windows else []
        damage += verify.check_readable(self.load_tensors, self.tensor_names())
        damage += self.batches.damage(self.n_steps())
        return damage + list(verify.check_readable(self.spool.get, self.spool.steps()))

    def size_bytes(self, without: tuple[str, ...] = ()) -> int:
        """Bytes on disk, all files but those and the folders whose names begin so."""
        return files.size_bytes(self.path, without)

    def scalars(self, table: str) -> pa.RecordBatchReader:
        """A stream over "rows", "steps" or "samples" without vectors; `rate` of group 0 is `rate_0`."""
        if table == "rows":
            return self._rows.scan(ROW_SCALARS, 0, self.n_rows())
        if table == "steps":
            names = [name for name in self._steps.schema.names if name not in ("P", "random", "generators")]
            return codec.flat(self._steps.table(names, 0, self.n_steps()), GROUP_KEYS).to_reader()
        if table == "samples":
            return self._samples.scan(SAMPLE_COLUMNS)
        raise UsageError(f"table must be 'rows', 'steps' or 'samples', got {table!r}.")


def store_of(run: HasPath) -> RunStore:
    """The store of a run, opened for reading where it is not open."""
    return run if isinstance(run, RunStore) else RunStore.open(run.path)
