"""Content of the samples to show with results: text, image, label, source. Only what the user passed is stored."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import UsageError
from .schema import SAMPLE_COLUMNS, samples_schema
from .tables import Table

_AT_ONCE = 500  # ids in one filter
_ROWS = 1 << 20  # rows in one fragment


def put(table: Table, ids: Sequence[str], columns: dict[str, Sequence[object] | None]) -> None:
    """Add samples, or replace the given columns of those with the same id; the last of equal ids wins."""
    for name, values in columns.items():
        kind = bytes if name == "image" else str
        if isinstance(values, str | bytes):
            raise UsageError(
                f"{name} must be a sequence with one value for each of {len(ids)} ids, got a single value."
            )
        if bad := [v for v in values or () if v is not None and not isinstance(v, kind)]:
            raise UsageError(
                f"values of {name!r} must be {kind.__name__}, got {type(bad[0]).__name__}"
                + (". Pass the bytes of a PNG file." if name == "image" else ".")
            )
        if values is not None and len(values) != len(ids):
            raise UsageError(f"{name} must have one value per id, got {len(values)} values for {len(ids)} ids.")
    last = sorted({name: i for i, name in enumerate(ids)}.values())
    if not last:
        return
    names = [ids[i] for i in last]
    absent = [k for k, v in columns.items() if v is None]
    stored = {row["id"]: row for row in get(table, names, ["id", *absent]).to_pylist()} if absent else {}
    picked: dict[str, list[object]] = {"id": list(names)}
    picked |= {
        k: [stored.get(x, {}).get(k) for x in names] if v is None else [v[i] for i in last] for k, v in columns.items()
    }
    table.upsert("id", pa.table(picked, schema=samples_schema()))


def get(table: Table, ids: Sequence[str] | None, columns: Sequence[str] = SAMPLE_COLUMNS) -> pa.Table:
    """The samples with these ids, in this order, or all; unknown ids are absent."""
    if ids is None:
        return table.table(columns)
    if len(ids) > 4 * _AT_ONCE:
        rows = table.table(columns)
    else:
        parts = [table.table(columns, where=where) for where in _filters(ids)]
        rows = pa.concat_tables(parts) if parts else table.table(columns, 0, 0)
    order = pc.index_in(pa.array(dict.fromkeys(ids), pa.string()), rows["id"].combine_chunks()).drop_null()
    return rows.take(order)


def erase(table: Table, ids: Sequence[str] | None) -> int:
    """Delete samples so that their bytes are gone from the disk; how many."""
    n = sum(table.delete(where) for where in (["id IS NOT NULL"] if ids is None else _filters(ids)))
    table.compact(_ROWS, least=1, must=True)
    table.cleanup()
    return n


def _filters(ids: Sequence[str]) -> list[str]:
    """Conditions that are true for these ids, each for some of them."""
    quoted = ["'" + name.replace("'", "''") + "'" for name in dict.fromkeys(ids)]
    return [f"id IN ({', '.join(quoted[i : i + _AT_ONCE])})" for i in range(0, len(quoted), _AT_ONCE)]
