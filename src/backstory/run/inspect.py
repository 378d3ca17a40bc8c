"""What a run holds, in plain values."""

from pathlib import Path
from typing import Any

from ..maths.projection import Shape
from ..maths.steps import NAMES
from .run import Run


def inspect(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """A summary for people and for `--json`; with `verify`, `damage` lists what is not sound."""
    run = Run(path)
    store, config = run.store, run.config
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
            "warm-up steps waiting": len(store.spooled()),
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
            b["name"]: f"{_size(b['shape'])} -> {Shape(*b['shape']).dims} numbers a row" for b in config["blocks"]
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
    found: dict[str, str] = {}
    for key in NAMES:
        values = table.groups[key]
        if key in names and values.size:
            lo, hi = float(values.min()), float(values.max())
            found[names[key]] = f"{lo:g}" if lo == hi else f"{lo:g} to {hi:g}"
    return found


def _size(shape: list[int]) -> str:
    return f"{shape[0]} × {shape[1]}" if shape[1] else f"{shape[0]}"
