"""The run's tables for other tools: everything but the vectors, as Parquet or CSV."""

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ..errors import UsageError
from ..store import RunStore

FORMATS = ("parquet", "csv")
TABLES = ("rows", "steps", "samples")


def export(path: Path, out: Path, to: str) -> dict[str, int]:
    """Write `rows`, `steps` and `samples`; returns file names with their numbers of rows."""
    if to not in FORMATS:
        raise UsageError(f"found --to {to!r}; expected one of {', '.join(FORMATS)}.")
    out.mkdir(parents=True, exist_ok=True)
    written: dict[str, int] = {}
    with RunStore.open(path) as store:
        for table in TABLES:
            file = out / f"{table}.{to}"
            written[str(file)] = _write(store.scalars(table), file, to)
    return written


def _write(reader: pa.RecordBatchReader, file: Path, to: str) -> int:
    schema = _flat(reader.schema) if to == "csv" else reader.schema
    opened = pa.csv.CSVWriter(file, schema) if to == "csv" else pa.parquet.ParquetWriter(file, schema)
    rows = 0
    with opened as writer:
        for batch in reader:
            writer.write_batch(_as_text(batch, schema) if to == "csv" else batch)
            rows += batch.num_rows
    return rows


def _flat(schema: pa.Schema) -> pa.Schema:
    """CSV has no lists and no bytes: both become text."""
    fields = [pa.field(f.name, pa.string() if _nested(f.type) else f.type) for f in schema]
    return pa.schema(fields)


def _nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _as_text(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        pa.array([_text(x) for x in column.to_pylist()], pa.string()) if _nested(column.type) else column
        for column in batch.columns
    ]
    return pa.record_batch(columns, schema=schema)


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.hex()
    return " ".join(str(x) for x in value) if isinstance(value, list) else str(value)
