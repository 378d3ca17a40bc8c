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
    stored = _stored(table, names, [k for k, v in columns.items() if v is None])
    picked: dict[str, list[object]] = {"id": list(names)}
    picked |= {
        k: [stored.get(x, {}).get(k) for x in names] if v is None else [v[i] for i in last] for k, v in columns.items()
    }
    table.upsert("id", pa.table(picked, schema=samples_schema()))


def get(table: Table, ids: Sequence[str] | None) -> pa.Table:
    """The samples with these ids, in this order, or all; unknown ids are absent."""
    if ids is None:
        return table.table(SAMPLE_COLUMNS)
    wanted = list(dict.fromkeys(ids))
    parts = [table.table(SAMPLE_COLUMNS, where=_among(some)) for some in _pieces(wanted)]
    rows = pa.concat_tables(parts) if parts else samples_schema().empty_table()
    order = pc.index_in(pa.array(wanted, pa.string()), rows["id"].combine_chunks()).drop_null()
    return rows.take(order)


def _stored(table: Table, ids: list[str], columns: list[str]) -> dict[str, dict[str, object]]:
    """What is there already of these columns, by id."""
    if not columns:
        return {}
    parts = (table.table(["id", *columns], where=_among(some)).to_pylist() for some in _pieces(ids))
    return {row["id"]: row for part in parts for row in part}


def erase(table: Table, ids: Sequence[str] | None) -> int:
    """Delete samples so that their bytes are gone from the disk; how many."""
    if ids is None:
        n = table.delete("id IS NOT NULL")
    else:
        n = sum(table.delete(_among(some)) for some in _pieces(list(dict.fromkeys(ids))))
    table.compact(_ROWS, least=1, must=True)
    table.cleanup()
    return n


def _pieces(ids: list[str]) -> list[list[str]]:
    return [ids[i : i + _AT_ONCE] for i in range(0, len(ids), _AT_ONCE)]


def _among(ids: Sequence[str]) -> str:
    quoted = ("'" + name.replace("'", "''") + "'" for name in ids)
    return f"id IN ({', '.join(quoted)})"
