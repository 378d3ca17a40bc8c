"""Export a run for people and other tools: a summary in plain values, and its tables (without vectors) as Parquet or CSV."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ..errors import UsageError
from ..maths.projection import Shape
from ..store import RunStore, StepTable
from .exact import Stored
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
    empty = _without_bytes(reader.schema.empty_table()) if to == "csv" else reader.schema.empty_table()
    opened = (pa.csv.CSVWriter if to == "csv" else pa.parquet.ParquetWriter)(file, empty.schema)
    rows = 0
    with opened as writer:
        for batch in reader:
            part = pa.Table.from_batches([batch])
            writer.write_table(_without_bytes(part) if to == "csv" else part)
            rows += batch.num_rows
    return rows


def _without_bytes(table: pa.Table) -> pa.Table:
    """CSV has no bytes: they become hexadecimal text."""
    for i, field in enumerate(table.schema):
        if pa.types.is_binary(field.type):
            text = [None if x is None else x.hex() for x in table[i].to_pylist()]
            table = table.set_column(i, field.name, pa.array(text, pa.string()))
    return table


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
            "exact results": sorted(_describe_exact(x) for x in run.exact_results()) if run.n_steps else [],
            "recipe": config.get("recipe"),
        },
        "settings": config["settings"],
        **({"energy kept in the warm-up": config["energy"]} if "energy" in config else {}),
        "optimizer": {**config["optimizer"], **_ranges(table)},
        "provenance": config["provenance"],
        "parameters": {
            b["name"]: f"{' × '.join(str(d) for d in b['shape'][:2] if d)} -> {Shape(*b['shape']).dims} dimensions"
            for b in config["blocks"]
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
        out["recording"] = run.recording_report().as_dict()
    if verify:
        out["damage"] = store.verify()
    return out


def _describe_exact(result: Stored) -> str:
    """Its queries, the model, the first step where that is not 0, the precision where it is not the recipe's, and what was not checked."""
    since = f", from step {result.since} on" if result.since else ""
    precision, unchecked = (
        f" in {result.precision}" if result.precision else "",
        "" if result.checked else ", not checked",
    )
    return f"{result.query} at step {result.at}{since}{precision}{unchecked}"


def _ranges(table: StepTable) -> dict[str, str]:
    names = {"rate": "learning rate", "l2": "L2 decay", "decay": "decoupled decay", "momentum": "momentum"}
    values = {name: table.groups[key] for key, name in names.items() if table.groups[key].size}
    ends = {name: (float(x.min()), float(x.max())) for name, x in values.items()}
    return {name: f"{lo:g}" if lo == hi else f"{lo:g} to {hi:g}" for name, (lo, hi) in ends.items()}
