r"""An approximate index beside embeddings: which of them have the largest products with a query.

Lance builds and searches it, with the metric "dot", whose distance is 1 − ⟨q, v⟩; the lowest products are the nearest to −q.
Embeddings have a scale for each row and block, which Lance does not know, so the index has vectors of its own: in float16, one
scale for all, filled up with zeros to a multiple of 8. Rows lie in partitions (IVF), of which a search looks into the most
promising ones, and a coordinate is kept in a few bits (RQ).
`idx-<at>.json` is written last. It names the data files of the embeddings that were indexed; Lance never gives a file's name
twice, so that an index of embeddings that have been written anew is seen to be stale, and is not used.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import StoreError
from .codec import vectors
from .files import read_json, remove, write_json
from .tables import Table, _fsync_folder, _fsync_version, _lance, commit_overwrite, write_fragment

BITS = 3  # of a coordinate; 1 finds 0.4 of the best 10 among 20 candidates where rows have no structure, 3 finds 0.94
EVEN = 8  # widths are a multiple of this
ROWS_IN_PARTITION = 16384
MOST_PARTITIONS = 4096
_NAME = re.compile(r"idx-(\d{8,})\.(json|lance)")


def partitions_for(n_rows: int) -> int:
    """How many partitions so many rows get."""
    return min(MOST_PARTITIONS, max(1, n_rows // ROWS_IN_PARTITION))


def identity(files: Sequence[str]) -> str:
    """One word for the data files of a table."""
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


class VectorTable(Table):
    """A table with an index over its column `v`."""

    index_cache = 256 << 20

    def build(self, partitions: int) -> int:
        """Index `v`, durably; the new version."""
        with _lance(self.path, "indexing"):
            self._ds.create_index("v", "IVF_RQ", metric="dot", num_partitions=partitions, num_bits=BITS)
            for folder in (self.path / "_indices").iterdir():
                _fsync_folder(folder)
            _fsync_folder(self.path / "_indices")
            self._ds.checkout_latest()
            _fsync_version(self.path, self._ds.version)
            return int(self._ds.version)

    def nearest(self, q: Tensor, k: int, probes: int) -> list[int]:
        """The `row`s of about the k largest ⟨q, v⟩, largest first."""
        asked = {"column": "v", "q": q.numpy(), "k": k, "nprobes": probes, "metric": "dot"}
        with _lance(self.path, "searching"):
            found = self._ds.to_table(columns=["row", "_distance"], nearest=asked)
        rows: list[int] = found["row"].to_pylist()
        return rows


class Indexes:
    """All indexes of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, VectorTable] = {}  # by the identity of their files

    def _paths(self, at: int) -> tuple[Path, Path]:
        return self.folder / f"idx-{at:08d}.lance", self.folder / f"idx-{at:08d}.json"

    def _found(self, kind: str) -> list[int]:
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(int(m[1]) for m in matches if m and m[2] == kind)

    def facts(self, at: int) -> dict[str, Any] | None:
        """What the file `.json` says of a complete index; None where there is none."""
        table, facts = self._paths(at)
        return read_json(facts) if facts.exists() and table.exists() else None

    def write(self, at: int, blocks: Iterable[tuple[int, Tensor]], largest: float, of: Sequence[str]) -> dict[str, Any]:
        """Index embeddings `(first row, (n, Σp))` of these files, of which no number is beyond `largest`; its facts.

        It is no index of the run before `settle` has written them.
        """
        self.drop(at)
        path, _ = self._paths(at)
        fragments, rows, schema = list[Any](), 0, None
        try:
            for first, E in blocks:
                table = _columns(first, E / (largest or 1.0))
                fragments += write_fragment(path, table)
                rows, schema = rows + len(E), table.schema
            if schema is None:
                raise StoreError(f"there are no embeddings before step {at} to index. Record and embed some first.")
            commit_overwrite(path, schema, fragments)
            partitions = partitions_for(rows)
            made = VectorTable(path, write=True)
            known = {"version": made.build(partitions), "files": identity(made.files()), "of": identity(of)}
        except BaseException:
            self.drop(at)
            raise
        return {"at": at, "rows": rows, "partitions": partitions, **known}

    def settle(self, at: int, facts: Mapping[str, Any]) -> None:
        """From now on this is the run's index at `at`."""
        write_json(self._paths(at)[1], facts)

    def nearest(self, facts: Mapping[str, Any], q: Tensor, k: int, probes: int) -> list[int]:
        """Row numbers of about the k largest products with q, largest first."""
        key = facts["files"]
        if key not in self._open:
            self._open[key] = VectorTable(self._paths(facts["at"])[0], version=facts["version"])
        return self._open[key].nearest(_filled(q / (float(q.abs().max()) or 1.0)), k, probes)

    def drop(self, at: int) -> None:
        """Forget one index; first its facts, so that it is never half there."""
        table, facts = self._paths(at)
        remove(facts)
        self._open.clear()
        shutil.rmtree(table, ignore_errors=True)

    def sweep(self, files: Callable[[int], Sequence[str]]) -> None:
        """Remove what was interrupted, and every index that is not of the embeddings that have these files now."""
        for at in {*self._found("json"), *self._found("lance")}:
            facts = self.facts(at)
            if facts is None or facts["of"] != identity(files(at)):
                self.drop(at)

    def size_bytes(self, at: int) -> int:
        """Bytes of one index on disk."""
        return sum(file.stat().st_size for file in self._paths(at)[0].rglob("*") if file.is_file())


def _columns(first: int, E: Tensor) -> pa.Table:
    rows = pa.array(np.arange(first, first + len(E), dtype=np.int64))
    return pa.table({"row": rows, "v": vectors(_filled(E))})


def _filled(x: Tensor) -> Tensor:
    """(…, p) in float16, with zeros up to a multiple of 8 numbers."""
    return F.pad(x, (0, -x.shape[-1] % EVEN)).to(torch.float16)
