"""Embeddings of a run's occurrences: one table for each checkpoint (`emb-<at>`) or segment (`seg-<from>-<to>`).

Blocks are written backward as they are made, each a fragment that no version names; one commit then
puts all of them in row order, and last `<name>.json` names that version. Until that file is replaced
readers see the embedding before, or none. A segment has its propagator beside it, written between the two, when that file is gone.
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
from .files import read_json, read_tensors, remove, write_json, write_tensors
from .layout import check_encoding
from .schema import embeddings_schema
from .tables import Table, commit_overwrite, write_fragment

RowKeys = Callable[[int, int], tuple[Tensor, Tensor]]  # (lo, hi) -> step, pos of these rows
Steps = tuple[int, ...]  # (at,) of a checkpoint's, (from, to) of a segment's


class Embeddings:
    """All embeddings of one kind of one run; `keys` gives step and position of its rows."""

    def __init__(self, folder: Path, dims: Callable[[], list[int]], keys: RowKeys, kind: str = "emb") -> None:
        self.folder = folder
        self.kind = kind
        self._dims = dims  # a function: the layout of a row is settled after the run was opened
        self._keys = keys
        self._name = re.compile(rf"{kind}-(\d{{8,}}(?:-\d{{8,}})*)\.(json|lance)")
        self._open: dict[tuple[Steps, int], Table] = {}

    def _paths(self, at: Steps) -> tuple[Path, Path, Path]:
        stem = "-".join([self.kind, *(f"{x:08d}" for x in at)])
        return self.folder / f"{stem}.lance", self.folder / f"{stem}.json", self.folder / f"{stem}.safetensors"

    def _listed(self, kind: str) -> list[Steps]:
        matches = [self._name.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted(tuple(map(int, m[1].split("-"))) for m in matches if m and m[2] == kind)

    def facts(self) -> dict[Steps, dict[str, Any]]:
        """Steps -> what the file `.json` says, for the complete ones."""
        return {at: read_json(self._paths(at)[1]) for at in self._listed("json") if self._paths(at)[0].exists()}

    def write(
        self,
        at: Steps,
        rows: tuple[int, int],
        blocks: Iterable[tuple[int, Tensor]],
        settings: Mapping[str, Any],
        encoding: str,
        propagator: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write blocks that arrive last first and cover `rows` exactly once; what `propagator` says then lies beside them.

        Each row has `settings["parts"]` vectors, one where that is not given.
        """
        dims = self._dims() * settings.get("parts", 1)
        schema = embeddings_schema(dims, enc.check(encoding))
        table, facts, tensors = self._paths(at)
        fragments: list[list[Any]] = []
        first, lowest = rows
        try:
            for row_start, E in blocks:
                self._check(at, row_start, E, lowest, sum(dims))
                step, pos = self._keys(row_start, row_start + len(E))
                scalars = [pa.array(column.numpy()).cast(pa.int32()) for column in (step, pos)]
                columns = [*scalars, *map(vectors, encoded(E, dims, encoding))]
                fragments.append(write_fragment(table, pa.Table.from_arrays(columns, schema=schema)))
                lowest = row_start
            if lowest != first:
                raise StoreError(
                    f"the embeddings for {self._of(at)} are missing rows {first} to {lowest}. Nothing was changed. "
                    "Pass every row exactly once, last block first."
                )
            in_order = [fragment for block in reversed(fragments) for fragment in block]
            version = commit_overwrite(table, schema, in_order)
            if propagator is not None:
                # the propagator before must not be read with these embeddings, nor this one with those before
                remove(facts)
                write_tensors(tensors, propagator(), None)
        except BaseException:
            self._sweep(at)
            raise
        contents = {
            "at": at[-1],
            "first_row": first,
            "rows": rows[1] - first,
            "encoding": encoding,
            "version": version,
            "settings": dict(settings),
        }
        write_json(facts, contents)
        self._open.clear()
        Table(table, write=True).cleanup()

    def _of(self, at: Steps) -> str:
        return f"checkpoint {at[0]}" if len(at) == 1 else f"steps {at[0]} to {at[1]}"

    def _check(self, at: Steps, row_start: int, E: Tensor, expected_end: int, width: int) -> None:
        if E.ndim != 2 or E.shape[1] != width:
            raise UsageError(
                f"embeddings for {self._of(at)} must have shape (n, {width}), the projection size of the run, "
                f"got {tuple(E.shape)}. Embed with the layers of this run."
            )
        end = row_start + E.shape[0]
        if end != expected_end or row_start < 0:
            raise StoreError(
                f"embeddings for {self._of(at)}: expected a block that ends at row {expected_end}, got rows "
                f"{row_start} to {end}. Nothing was changed. Pass every row once, last block first."
            )
        if not enc.all_finite(E):
            raise NumericalError(
                f"embeddings for {self._of(at)} contain NaN or Inf in rows {row_start} to {end}. Nothing was changed. "
                "The recursion overflowed: embed an earlier checkpoint, or use contraction='auto'."
            )

    def propagator(self, at: Steps) -> dict[str, Tensor]:
        """What lies beside a segment's embeddings."""
        return read_tensors(self._paths(at)[2])

    def table(self, at: Steps) -> Table:
        """The open table of a complete embedding, at the version its facts name."""
        facts = self.facts()
        if at not in facts:
            known = [x[0] if len(x) == 1 else x for x in sorted(facts)]
            raise StoreError(f"there are no embeddings for {self._of(at)} (stored: {known}). Run embed for it first.")
        check_encoding(self._paths(at)[0], facts[at]["encoding"])
        key = (at, facts[at]["version"])
        if key not in self._open:
            self._open[key] = Table(self._paths(at)[0], version=key[1])
        return self._open[key]

    def read(self, at: Steps, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """The `lo`-th to `hi`-th embedding of a table, (hi − lo, Σp)."""
        table = self.table(at)
        n = table.count()
        if not 0 <= lo <= hi <= n:
            raise UsageError(f"rows {lo} to {hi} are out of range: the embedding for {self._of(at)} has {n} rows.")
        names = [name for name in ("e", "se") if name in table.schema.names]
        parts = self.facts()[at]["settings"].get("parts", 1)
        return read_vectors(table, names, self._dims() * parts, lo, hi, dtype)

    def drop(self, at: Steps, quietly: bool = False) -> None:
        """Forget one embedding; first its facts, so that it is never half there."""
        table, facts, tensors = self._paths(at)
        remove(facts)
        remove(tensors)
        self._open.clear()
        if table.exists():
            shutil.rmtree(table, ignore_errors=quietly)

    def drop_after(self, step: int) -> None:
        """Forget the embeddings of checkpoints, or the segments, that end after `step`."""
        for at in {*self._listed("json"), *self._listed("lance")}:
            if at[-1] > step:
                self.drop(at)

    def _sweep(self, at: Steps) -> None:
        """Remove a table whose first writing was interrupted."""
        if not self._paths(at)[1].exists():
            self.drop(at, quietly=True)  # another error may be on its way, and must not be hidden

    def sweep(self) -> None:
        """Remove every table whose first writing was interrupted."""
        for at in self._listed("lance"):
            self._sweep(at)
