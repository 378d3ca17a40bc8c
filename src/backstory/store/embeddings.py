"""Embeddings beside the rows they belong to: one table per checkpoint, aligned by position.

Blocks are written backward as they are made, each a fragment that no version names; one commit then
puts all of them in row order, and last `emb-<at>.json` names that version. Until that file is replaced
readers see the embedding before, or none.
Knows nothing of how an embedding is computed.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from ..errors import NumericalError, StoreError, UsageError
from ..maths import encoding as enc
from .codec import encoded, read_vectors, vectors
from .files import read_json, remove, write_json
from .records import embeddings_schema
from .tables import Table, commit_overwrite, write_fragment

Keys = Callable[[int, int], tuple[Tensor, Tensor]]  # (lo, hi) -> step, pos of these rows
_NAME = re.compile(r"emb-(\d{8,})\.(json|lance)")


class Embeddings:
    """All embeddings of one run; `keys` gives step and position of its rows."""

    def __init__(self, folder: Path, dims: list[int], keys: Keys) -> None:
        self.folder = folder
        self.dims = dims
        self.width = sum(dims)
        self._keys = keys
        self._open: dict[tuple[int, int], Table] = {}

    def _paths(self, at: int) -> tuple[Path, Path]:
        return self.folder / f"emb-{at:08d}.lance", self.folder / f"emb-{at:08d}.json"

    def _found(self, kind: str) -> list[int]:
        matches = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(int(m[1]) for m in matches if m and m[2] == kind)

    def facts(self) -> dict[int, dict[str, Any]]:
        """at -> what `emb-<at>.json` says, for the complete ones."""
        return {at: read_json(self._paths(at)[1]) for at in self._found("json") if self._paths(at)[0].exists()}

    def write(
        self,
        at: int,
        n_rows: int,
        blocks: Iterable[tuple[int, Tensor]],
        settings: Mapping[str, Any],
        encoding: str,
    ) -> None:
        """Write blocks that arrive last first and cover rows 0 to `n_rows` exactly once."""
        schema = embeddings_schema(self.dims, enc.check(encoding))
        table, facts = self._paths(at)
        fragments: list[list[Any]] = []
        lowest = n_rows
        try:
            for row_start, E in blocks:
                self._check(at, row_start, E, lowest)
                fragments.append(write_fragment(table, self._columns(row_start, E, encoding, schema)))
                lowest = row_start
            if lowest != 0:
                raise StoreError(
                    f"the embeddings for checkpoint {at} miss rows 0 to {lowest}; nothing was changed. "
                    "Give every row exactly once, last block first."
                )
            in_order = [fragment for block in reversed(fragments) for fragment in block]
            version = commit_overwrite(table, schema, in_order)
        except BaseException:
            self._sweep(at)
            raise
        said = {
            "at": at,
            "rows": n_rows,
            "encoding": encoding,
            "version": version,
            "settings": dict(settings),
        }
        write_json(facts, said)
        self._open.clear()
        Table(table, write=True).cleanup()

    def _check(self, at: int, row_start: int, E: Tensor, expected_end: int) -> None:
        if E.ndim != 2 or E.shape[1] != self.width:
            raise UsageError(
                f"embeddings for checkpoint {at} have shape {tuple(E.shape)}, expected (n, {self.width}), "
                "as wide as the rows of the run. Embed with the layers of this run."
            )
        end = row_start + E.shape[0]
        if end != expected_end or row_start < 0:
            raise StoreError(
                f"embeddings for checkpoint {at}: a block covers rows {row_start} to {end}, expected one "
                f"that ends at {expected_end}; nothing was changed. Give every row once, last block first."
            )
        if not bool(E.isfinite().all()):
            raise NumericalError(
                f"embeddings for checkpoint {at} have a NaN or Inf in rows {row_start} to {end}; nothing was "
                "changed. The recursion overflowed: embed an earlier checkpoint, or damp the curvature."
            )

    def _columns(self, row_start: int, E: Tensor, encoding: str, schema: pa.Schema) -> pa.Table:
        step, pos = self._keys(row_start, row_start + E.shape[0])
        scalars = [pa.array(column.numpy()).cast(pa.int32()) for column in (step, pos)]
        return pa.Table.from_arrays([*scalars, *map(vectors, encoded(E, self.dims, encoding))], schema=schema)

    def table(self, at: int) -> Table:
        """The open table of a complete embedding, at the version its facts name."""
        facts = self.facts()
        if at not in facts:
            raise StoreError(f"there is no embedding for checkpoint {at}; there are {sorted(facts)}. Embed it first.")
        key = (at, facts[at]["version"])
        if key not in self._open:
            self._open[key] = Table(self._paths(at)[0], version=key[1])
        return self._open[key]

    def read(self, at: int, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """Embeddings of rows `lo` to `hi`, (hi − lo, Σp)."""
        table = self.table(at)
        n = table.count()
        if not 0 <= lo <= hi <= n:
            raise UsageError(f"rows {lo} to {hi} were asked of the embedding {at}, which has {n}. Ask within these.")
        names = [name for name in ("e", "se") if name in table.schema.names]
        return read_vectors(table, names, self.dims, lo, hi, dtype)

    def drop(self, at: int) -> None:
        """Forget one embedding; first its facts, so that it is never half there."""
        table, facts = self._paths(at)
        remove(facts)
        self._open.clear()
        if table.exists():
            shutil.rmtree(table)

    def drop_after(self, step: int) -> None:
        """Forget the embeddings of checkpoints later than `step`."""
        for at in {*self._found("json"), *self._found("lance")}:
            if at > step:
                self.drop(at)

    def _sweep(self, at: int) -> None:
        """Remove a table whose first writing was interrupted."""
        table, facts = self._paths(at)
        if not facts.exists() and table.exists():
            shutil.rmtree(table, ignore_errors=True)

    def sweep(self) -> None:
        """Remove every table whose first writing was interrupted."""
        for at in self._found("lance"):
            self._sweep(at)
