"""Steps as Arrow columns and back: encode, checksum, decode.

The checksum of a step is a crc32 over the bytes of its codes g, its scales s (if any), its weight, loss,
gdot and own (float64, little endian; own if there), its curvature columns h, hs, kappa, hdot (those that are there), the diagonal P of
the step (float32, if there), and its sample ids (UTF-8, each followed by a zero byte).

Where a row's blocks are kept as their factors (`maths.encoding`), these are what is encoded.
Shapes:  n rows, Σp numbers in a row, L layers.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..maths import encoding as enc
from ..maths.encoding import Block, multiply_factors, parts, sizes, split_factors
from .schema import GROUP_KEYS, STEP_NUMBERS, RowBlock, StepRecord, StepTable, rows_schema, steps_schema
from .tables import Table

SLAB = 8 << 20  # bytes of rows that are encoded or decoded at once
UNKNOWN = -1  # the checksum of a batch that was not seen
_NUMBERS = ("step", "pos", "weight", "loss", "gdot")
SUMMED = ("g", "s", "weight", "loss", "gdot", "own", "h", "hs", "kappa", "hdot")  # columns under the checksum, in order


def vectors(values: Tensor) -> pa.Array:
    """A 2-d tensor as an Arrow array of fixed-size lists."""
    flat = pa.array(values.contiguous().numpy().reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def tensor(column: pa.Array | pa.ChunkedArray) -> Tensor:
    """An Arrow column as a tensor over the same memory: read only, so convert or copy it at once."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_fixed_size_list(array.type):
        flat: Tensor = from_dlpack(array.flatten())
        return flat.reshape(len(array), array.type.list_size)
    return from_dlpack(array)


def encoded(rows: Tensor, dims: Sequence[Block], encoding: str) -> list[Tensor]:
    """`[codes (n, Σp)]` or `[codes, scales (n, L)]`, on the CPU."""
    codes, scales = enc.encode(split_factors(rows.detach().cpu(), dims), parts(dims), encoding)
    return [codes] if scales is None else [codes, scales]


def decode_into(out: Tensor, columns: Sequence[pa.Array], dims: Sequence[Block]) -> None:
    """Write what `encoded` gave, read as Arrow columns, as rows into `out` (n, Σp)."""
    codes, scales = tensor(columns[0]), tensor(columns[1]) if len(columns) > 1 else None
    if parts(dims) == sizes(dims):
        enc.decode(codes, scales, parts(dims), out.dtype, out=out)
    else:
        out[:] = multiply_factors(enc.decode(codes, scales, parts(dims), out.dtype), dims)


def checksum(parts: Sequence[NDArray[np.generic]], samples: Sequence[str]) -> int:
    """The crc32 of one step."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(np.ascontiguousarray(part).view(np.uint8).reshape(-1).data, crc)
    return zlib.crc32("".join(f"{name}\0" for name in samples).encode(), crc)


def rows_table(
    records: Sequence[StepRecord],
    dims: Sequence[Block],
    encoding: str,
    curvature_rows: int = 0,
    split: bool = False,
    own: bool = False,
) -> tuple[pa.Table, list[int]]:
    """The rows of some steps, encoded, and a checksum per step."""
    schema = rows_schema(dims, encoding, curvature_rows, split, own)
    batches, crcs = [], []
    for slab in _slabs(records):
        batch, some = _rows_batch(slab, dims, encoding, schema)
        batches.append(batch)
        crcs += some
    return pa.Table.from_batches(batches, schema), crcs


def _slabs(records: Sequence[StepRecord]) -> Iterator[list[StepRecord]]:
    slab: list[StepRecord] = []
    for record in records:
        slab.append(record)
        if sum(r.nbytes for r in slab) >= SLAB:
            yield slab
            slab = []
    if slab:
        yield slab


def _rows_batch(
    records: Sequence[StepRecord], dims: Sequence[Block], encoding: str, schema: pa.Schema
) -> tuple[pa.RecordBatch, list[int]]:
    counts = [len(r.samples) for r in records]
    vecs = encoded(torch.cat([r.rows for r in records]), dims, encoding) if "g" in schema.names else []
    numbers = [
        _joined(records, name) for name in ("weight", "loss", "gdot", "own") if name in schema.names
    ]  # (n,) each
    samples = [name for r in records for name in r.samples]
    step = np.repeat(np.array([r.step for r in records], dtype=np.int32), counts)
    pos = np.concatenate([np.arange(size, dtype=np.int32) for size in counts])
    scalars = [pa.array(step), pa.array(pos), pa.array(samples, pa.string()), *(pa.array(x.numpy()) for x in numbers)]
    more = _curvature_columns(records, dims, encoding)
    batch = pa.RecordBatch.from_arrays([*scalars, *map(vectors, [*vecs, *more])], schema=schema)
    parts = [x.split(counts) for x in (*vecs, *numbers, *more)]
    diagonals = [[] if r.P is None else [r.P.float()] for r in records]
    columns = [[*(part[i] for part in parts), *P] for i, P in enumerate(diagonals)]  # of each step
    return batch, [checksum([x.numpy() for x in some], r.samples) for some, r in zip(columns, records, strict=True)]


def _curvature_columns(records: Sequence[StepRecord], dims: Sequence[Block], encoding: str) -> list[Tensor]:
    """h, hs (scaled encodings), kappa and hdot of some steps, or nothing where none are kept."""
    given = [r.curvature for r in records if r.curvature is not None]
    if not given:
        return []
    rows = torch.cat(given)  # (n, R, Σp)
    vecs = encoded(rows.flatten(1), [*dims] * rows.shape[1], encoding)
    return [*vecs, *(_joined(records, name) for name in ("kappa", "hdot"))]


def _joined(records: Sequence[StepRecord], name: str) -> Tensor:
    """One of their numbers, in float64."""
    return torch.cat([getattr(r, name).detach().cpu().double() for r in records])


def steps_table(records: Sequence[StepRecord], row_start: int, crcs: Sequence[int], n_groups: int) -> pa.Table:
    """The lines of `steps` for some steps, whose rows start at `row_start`."""
    counts = [len(r.samples) for r in records]
    starts = row_start + np.cumsum([0, *counts[:-1]])
    columns: dict[str, object] = {
        "step": [r.step for r in records],
        "row_start": starts.tolist(),
        "rows": counts,
        "crc": list(crcs),
    }
    columns |= {name: [float(getattr(r, name)) for r in records] for name in STEP_NUMBERS}
    columns["trained"] = [float(r.coverage if r.trained is None else r.trained) for r in records]
    columns |= {key: [[float(x) for x in r.groups[key]] for r in records] for key in GROUP_KEYS}
    columns["batch"] = [UNKNOWN if r.batch is None else r.batch for r in records]
    columns |= {"generators": [list(r.generators) for r in records], "random": [r.random for r in records]}
    diagonals = [r.P.float() for r in records if r.P is not None]
    if diagonals:
        columns["P"] = vectors(torch.stack(diagonals))
    return pa.table(columns, schema=steps_schema(n_groups, len(diagonals[0]) if diagonals else 0))


def read_steps(table: Table, lo: int, hi: int) -> StepTable:
    """Steps `lo` to `hi`."""
    numbers = (*STEP_NUMBERS, "trained")
    whole = ("step", "row_start", "rows", "crc", "batch")
    columns = table.table([*whole, *numbers, *GROUP_KEYS, "generators"], lo, hi)
    ints = {name: columns[name].to_numpy().astype(np.int64) for name in whole}
    floats = {name: columns[name].to_numpy().copy() for name in numbers}
    groups = {key: tensor(columns[key]).numpy().copy() for key in GROUP_KEYS}
    return StepTable(**ints, **floats, groups=groups, generators=tensor(columns["generators"]).numpy().copy())


def read_random(table: Table, lo: int, hi: int) -> dict[int, bytes]:
    """Step -> the random states before it, of steps `lo` to `hi`, where something was drawn since the step before."""
    values = table.table(["random"], lo, hi)["random"].to_pylist()
    return {t: value for t, value in enumerate(values, lo) if value is not None}


def read_diagonal(table: Table, lo: int, hi: int) -> Tensor | None:
    """P of steps `lo` to `hi`, (T, Σp) float32, or None where none is kept."""
    return tensor(table.table(["P"], lo, hi)["P"]).clone() if "P" in table.schema.names else None


def read_vectors(table: Table, names: Sequence[str], dims: Sequence[Block], lo: int, hi: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Encoded columns of rows `lo` to `hi`, decoded slab by slab into one tensor (hi − lo, Σp)."""
    width = sum(sizes(dims))
    out = torch.empty(hi - lo, width, dtype=dtype)
    at = 0
    for batch in table.batches(names, lo, hi, slab_rows(width, dtype)):
        decode_into(out[at : at + len(batch)], batch.columns, dims)
        at += len(batch)
    return out


def slab_rows(width: int, dtype: torch.dtype) -> int:
    """How many rows make one slab."""
    return max(16, SLAB // max(1, width * dtype.itemsize))


def read_block(
    table: Table,
    dims: Sequence[Block],
    lo: int,
    hi: int,
    *,
    rows: bool,
    samples: bool,
    dtype: torch.dtype,
    curvature: bool = False,
) -> RowBlock:
    """Rows `lo` to `hi` by position."""
    more = [*(["own"] if "own" in table.schema.names else []), *(["sample"] if samples else [])]
    columns = table.table([*_NUMBERS, *more], lo, hi)
    step, pos = (tensor(columns[name]).long() for name in ("step", "pos"))
    weight, loss, gdot = (tensor(columns[name]).clone() for name in ("weight", "loss", "gdot"))
    ids = columns["sample"].to_pylist() if samples else None
    names = [name for name in ("g", "s") if name in table.schema.names]
    split = not names
    wanted = (curvature or (rows and split)) and "h" in table.schema.names
    h, *scalars = _read_curvature(table, dims, lo, hi, dtype) if wanted else (None, None, None)
    grads = None
    if rows:
        grads = read_vectors(table, names, dims, lo, hi, dtype) if h is None or not split else h.sum(1)
    own = tensor(columns["own"]).clone() if "own" in more else None
    block = RowBlock(lo, step, pos, weight, loss, gdot, ids, grads, own=own)
    return (
        block
        if h is None or not curvature
        else block._replace(**dict(zip(("curvature", "kappa", "hdot"), (h, *scalars), strict=True)))
    )


def _read_curvature(
    table: Table, dims: Sequence[Block], lo: int, hi: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`(h (n, R, Σp), kappa (n, R), hdot (n, R))`."""
    R = table.schema.field("kappa").type.list_size
    names = [name for name in ("h", "hs") if name in table.schema.names]
    rows = read_vectors(table, names, [*dims] * R, lo, hi, dtype)
    numbers = table.table(["kappa", "hdot"], lo, hi)
    kappa, hdot = (tensor(numbers[name]).clone() for name in ("kappa", "hdot"))
    return rows.reshape(hi - lo, R, sum(sizes(dims))), kappa, hdot


def flat(table: pa.Table, lists: Sequence[str]) -> pa.Table:
    """The same table with each fixed-size list `x` as plain columns `x_0`, `x_1`, …, after all others."""
    for name in lists:
        values, size = table[name].combine_chunks().flatten(), table.schema.field(name).type.list_size
        for i in range(size):
            table = table.append_column(f"{name}_{i}", values[i::size])
    return table.drop_columns(list(lists))
