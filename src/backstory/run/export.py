"""Export a run for people and other tools: a summary in plain values, and its tables (without vectors) as Parquet or CSV."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ..errors import UsageError
from ..maths.projection import Shape
from ..maths.steps import NAMES
from ..store import RunStore
from .run import Run

FORMATS = ("parquet", "csv")
TABLES = ("rows", "steps", "samples")


def export(path: Path, out: Path, to: str) -> dict[str, int]:
    """Write `rows`, `steps` and `samples`; returns file names with their numbers of rows."""
    if to not in FORMATS:
        raise UsageError(f"the export format must be one of {', '.join(FORMATS)}, got {to!r}.")
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


def inspect(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """A summary for people and for `--json`; with `verify`, `damage` lists what is not sound."""
    run = Run(path)
    store, config = run._store, run.config
    table = store.steps()
    out: dict[str, Any] = {
        "run": {
            "path": str(path),
            "format": config["format"],
            "steps": run.n_steps,
            "occurrences": store.n_rows(),
            "bytes": store.size_bytes(),
            "bytes per occurrence": store.bytes_per_row,
            "closed": config.get("closed", False),
            "warm-up steps waiting": len(store.spool.steps()),
            "checkpoints": run.checkpoints,
            "embeddings": sorted(store.embeddings()),
            "segments": [f"{lo} to {hi}" for lo, hi in sorted(store.segments())],
            "query sets": run.query_sets,
            "recipe": config.get("recipe"),
        },
        "settings": config["settings"],
        **({"energy kept in the warm-up": config["energy"]} if "energy" in config else {}),
        "optimizer": {**config["optimizer"], **_ranges(table)},
        "provenance": config["provenance"],
        "parameters": {
            b["name"]: f"{_size(b['shape'])} -> {Shape(*b['shape']).dims} dimensions" for b in config["blocks"]
        },
        "caveats": list(run.caveats()),
    }
    if run.n_steps:
        out["gradients"] = {
            "share of steps clipped": float((table.clip < 1).mean()),
            "share of squared norm covered, mean": float(table.trained.mean()),
            "largest norm": float(table.norm.max()),
            "at step": int(table.step[table.norm.argmax()]),
        }
        out["quality"] = run.quality().as_dict()
    if verify:
        out["damage"] = store.verify()
    return out


def _ranges(table: Any) -> dict[str, str]:
    names = {"rate": "learning rate", "l2": "L2 decay", "decay": "decoupled decay", "momentum": "momentum"}
    ranges: dict[str, str] = {}
    for key in NAMES:
        values = table.groups[key]
        if key in names and values.size:
            lo, hi = float(values.min()), float(values.max())
            ranges[names[key]] = f"{lo:g}" if lo == hi else f"{lo:g} to {hi:g}"
    return ranges


def _size(shape: list[int]) -> str:
    return f"{shape[0]} × {shape[1]}" if shape[1] else f"{shape[0]}"
