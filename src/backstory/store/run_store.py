"""One run on disk: its steps and rows, and what lies beside them, with one writer at a time.

Beside the rows lie embeddings, tensors (bases, checkpoints), samples, and the warm-up spool.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ..errors import UsageError
from . import codec, files, samples, verify
from .embeddings import Embeddings
from .ledger import Ledger
from .lock import RunLock
from .records import GROUP_KEYS, ROW_SCALARS, SAMPLE_COLUMNS
from .spool import Spool

LABELS_AT_ONCE = 1 << 16  # rows whose ids are read together
Labels = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # ids as text, steps
_CHECKPOINT = re.compile(r"(?:checkpoint|scale)-(\d+)")


class RunStore(Ledger):
    """An open run; make one with `create` or `open`, and close it (or use it as a context manager)."""

    def __init__(self, path: Path, lock: RunLock | None) -> None:
        super().__init__(path, lock)
        self._spool = Spool(path / "spool")
        self._embeddings = Embeddings(path, self.dims, self._keys)
        self._segments = Embeddings(path, self.dims, self._keys, "seg")
        for kept in (self._embeddings, self._segments) if lock is not None else ():
            kept.drop_after(self.n_steps())
            kept.sweep()

    def _keys(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        block = self.read(lo, hi, rows=False)
        return block.step, block.pos

    def truncate(self, step: int) -> None:
        """Drop the steps from `step` on, and the embeddings, checkpoints and spool that follow from them."""
        self._writable()
        with self._mutex:
            n = self._committed[0]
            if not 0 <= step <= n:
                raise UsageError(f"the run has {n} steps and cannot be truncated to {step}. Give a step from 0 to {n}.")
            self._embeddings.drop_after(step)
            self._segments.drop_after(step)
            self.drop_checkpoints_after(step)
            self._spool.clear(step)
            self._cut(step)

    def drop_checkpoints_after(self, step: int) -> None:
        """Delete what was kept of the model and the optimizer at later steps."""
        for name in self.tensor_names():
            if (match := _CHECKPOINT.fullmatch(name)) and int(match[1]) > step:
                self.delete_tensors(name)

    # embeddings

    def write_embeddings(
        self,
        at: int,
        blocks: Iterable[tuple[int, Tensor]],
        settings: Mapping[str, Any],
        encoding: str = "float16",
    ) -> None:
        """Keep embeddings of all rows before step `at`, given as blocks `(row_start, E)`, last first."""
        self._writable()
        self._in_layout(self._embeddings).write((at,), (0, self.rows_before(at)), blocks, settings, encoding)

    def _in_layout(self, kept: Embeddings, times: int = 1) -> Embeddings:
        """Embeddings in the layout of now: it may have been settled after the run was opened."""
        kept.dims = self.dims * times
        return kept

    def embeddings(self) -> dict[int, dict[str, Any]]:
        """at -> settings of the complete embeddings."""
        n = self.n_steps()
        return {at: facts["settings"] for (at,), facts in self._embeddings.facts().items() if at <= n}

    def read_embeddings(self, at: int, lo_row: int, hi_row: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Embeddings of rows `lo_row` to `hi_row`, (n, Σp)."""
        return self._in_layout(self._embeddings).read((at,), lo_row, hi_row, dtype)

    def drop_embeddings(self, at: int) -> None:
        """Forget one embedding."""
        self._writable()
        self._embeddings.drop((at,))

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
        self._in_layout(self._segments, settings["parts"]).write(steps, rows, blocks, settings, encoding, propagator)

    def segments(self) -> dict[tuple[int, int], dict[str, Any]]:
        """(from, to) -> facts of the complete segments."""
        n = self.n_steps()
        return {(lo, hi): facts for (lo, hi), facts in self._segments.facts().items() if hi <= n}

    def read_segment(self, steps: tuple[int, int], lo: int, hi: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The `lo`-th to `hi`-th embedding of a segment, (n, parts · Σp)."""
        parts = self._segments.facts()[steps]["settings"]["parts"]
        return self._in_layout(self._segments, parts).read(steps, lo, hi, dtype)

    def segment_propagator(self, steps: tuple[int, int]) -> dict[str, Tensor]:
        """The propagator that was kept with a segment."""
        return self._segments.propagator(steps)

    def drop_segments(self) -> None:
        """Forget all segments."""
        self._writable()
        for steps in self._segments.facts():
            self._segments.drop(steps)

    # tensors beside the tables

    def _file(self, name: str) -> Path:
        return self.path / f"{files.check_name(name)}.safetensors"

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Keep tensors as `<name>.safetensors`, durably, in the place of an older one."""
        self._writable()
        files.write_tensors(self._file(name), tensors, metadata)

    def load_tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors kept under `name`."""
        return files.read_tensors(self._file(name))

    def tensor_metadata(self, name: str) -> dict[str, str]:
        """The text kept beside the tensors."""
        return files.read_metadata(self._file(name))

    def tensor_names(self) -> list[str]:
        """All names under which tensors are kept."""
        return sorted(path.name.removesuffix(".safetensors") for path in self.path.glob("*.safetensors"))

    def checkpoints(self) -> list[int]:
        """Steps whose weights are kept."""
        names = [n.removeprefix("checkpoint-") for n in self.tensor_names() if n.startswith("checkpoint-")]
        return sorted(map(int, names))

    def delete_tensors(self, name: str) -> None:
        """Delete `<name>.safetensors`, if it is there."""
        self._writable()
        files.remove(self._file(name))

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
        """Keep what a person wants to see of samples; replaces those with the same id."""
        self._writable()
        with self._mutex:
            samples.put(self._samples, ids, {"text": text, "image": image, "label": label, "source": source})

    def samples(self, ids: Sequence[str] | None = None) -> pa.Table:
        """The samples with these ids, in this order, or all; unknown ids are absent."""
        return samples.get(self._samples, ids)

    def erase_samples(self, ids: Sequence[str] | None) -> int:
        """Delete samples (None: all) so that their bytes leave the disk; how many."""
        self._writable()
        with self._mutex:
            return samples.erase(self._samples, ids)

    # warm-up spool

    def spool(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
        """Keep a step that waits for its basis, durably; its size in bytes."""
        self._writable()
        return self._spool.put(step, tensors, meta)

    def spooled(self) -> list[int]:
        """The steps that wait, in order."""
        return self._spool.steps()

    def read_spool(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `spool` was given."""
        return self._spool.get(step)

    def clear_spool(self, from_step: int = 0) -> None:
        """Drop the waiting steps from `from_step` on."""
        self._writable()
        self._spool.clear(from_step)

    # the whole

    def verify(self) -> list[str]:
        """Read everything again; sentences about what is damaged, or none."""
        steps, on_disk = self.steps(), self._rows.count()
        found = list(verify.check_steps(steps, on_disk))
        found += [] if found else verify.check_rows(steps, self._rows, self.width, self.diagonal)
        for at in self.embeddings():
            found += verify.check_embedding(
                f"at {at}", (0, self.rows_before(at)), self._embeddings.table((at,)), self._rows
            )
        for lo, hi in self.segments():
            rows = self.rows_before(lo), self.rows_before(hi)
            found += verify.check_embedding(f"of steps {lo} to {hi}", rows, self._segments.table((lo, hi)), self._rows)
        windows = [f"curvature-{lo:08d}-{hi:08d}" for lo, hi in self.config.get("compressed", {}).get("windows", [])]
        found += [f"{name}.safetensors is missing." for name in windows if name not in self.tensor_names()]
        found += verify.check_readable(self.load_tensors, self.tensor_names())
        return found + list(verify.check_readable(self.read_spool, self.spooled()))

    def size_bytes(self) -> int:
        """Bytes on disk, all files."""
        return files.size_bytes(self.path)

    def scalars(self, table: str) -> pa.RecordBatchReader:
        """A stream over "rows", "steps" or "samples" without vectors; `rate` of group 0 is `rate_0`."""
        if table == "rows":
            return self._rows.scan(ROW_SCALARS, 0, self.n_rows())
        if table == "steps":
            return codec.flat(
                self._steps.scan([n for n in self._steps.schema.names if n != "P"], 0, self.n_steps()), GROUP_KEYS
            )
        if table == "samples":
            return self._samples.scan(SAMPLE_COLUMNS)
        raise UsageError(f"there is no table {table!r}; expected rows, steps or samples.")
