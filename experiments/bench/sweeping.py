"""Embedding a recorded run, from disk to disk: per layer and joint, and how time and memory grow with steps, p and layers.

The run is workload B with 1,024 random coordinates for each linear layer, the gradient rows as curvature; once as
recorded (AdamW, two matrices), once with its steps taken as SGD, which is the paper's proxy and what rivals compute.
Operations: 4 p² for each row and block of p coordinates, twice that with momentum; where a run has at most p/2 rows, so that no
matrix is made, far fewer are needed and no share of the peak is told.
"""

import tempfile
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import torch

from backstory.maths.blocked import Propagator
from backstory.run.run import Run
from backstory.run.sweep import Layers, backward, slices
from backstory.store import RunStore
from experiments.bench.children import in_child
from experiments.bench.embedding import product_peak
from experiments.bench.recording import Say, quiet
from experiments.bench.timing import Times, median, timed
from experiments.bench.training import Settings, recorded_run
from experiments.bench.workloads import SCALES, Workload

LINEAR = ["blocks.*.qkv", "blocks.*.out", "blocks.*.up", "blocks.*.down", "head"]
PROXY: Settings = {
    "projection": "random",
    "rank": 32,
    "curvature": "empirical",
    "optimizer_model": "sgd",
    "layers": LINEAR,
}
AS_RECORDED: Settings = {**PROXY, "optimizer_model": "auto"}
EPOCHS = 4  # of the two main runs: the figures of one epoch, and of all
ROOM = 0.6  # of the memory that is free, at most


def bench_sweep(*, scale: str = "full", repeats: int = 3, say: Say = quiet) -> dict[str, Any]:
    """`{"disk": lines, "slopes": lines}`."""
    work = SCALES[scale]["B"]
    with tempfile.TemporaryDirectory() as folder:
        runs = _runs(work, Path(folder), say)
        say("embed: from disk, per layer and joint")
        peak = product_peak()
        disk = [
            _line(runs[name], name, per_layer, at, peak, repeats)
            for name in ("SGD as a proxy", "AdamW as recorded")
            for per_layer in (True, False)
            for at in (work.epoch, EPOCHS * work.epoch)
        ]
        say("embed: slopes in steps, p and layers; memory of child processes")
        return {"disk": disk, "slopes": _slopes(runs, work, repeats)}


def _runs(work: Workload, folder: Path, say: Say) -> dict[str, Run]:
    first = [name for name in LINEAR if name != "head"]
    asked: dict[str, Settings] = {
        "SGD as a proxy": PROXY,
        "AdamW as recorded": AS_RECORDED,
        "rank 16": {**PROXY, "rank": 16},
        "one block": {**PROXY, "layers": [name.replace("*", "0") for name in first]},
    }
    result = {}
    for i, (name, settings) in enumerate(asked.items()):
        steps = work.epoch * (EPOCHS if name in ("SGD as a proxy", "AdamW as recorded") else 1)
        say(f"embed: recording {steps} steps of B, {name}")
        result[name] = recorded_run(work, folder / str(i), settings, steps)[0]
    return result


def _line(run: Run, name: str, per_layer: bool, at: int, peak: float, repeats: int) -> dict[str, Any]:
    dims = RunStore.open(run.path).dims if per_layer else [sum(RunStore.open(run.path).dims)]
    rows, momentum = int(run.steps(0, at).rows.sum()), not name.startswith("SGD")
    line = {
        "run": name,
        "per_layer": per_layer,
        "layers": len(RunStore.open(run.path).dims),
        "dims": run.width,
        "rows": rows,
    }
    short = 2 * rows <= min(dims)
    copies = 3 if momentum else 2  # A, with momentum C, and what they are made into
    need = 8 * rows * sum(dims) if short else 4 * copies * sum(d * d for d in dims)
    if need > ROOM * _free_memory():
        return {
            **line,
            "skipped": f"needs about {need / 2**30:.1f} GB of memory; {_free_memory() / 2**30:.1f} GB are free",
        }
    times, read = (
        _embedding(run, at, per_layer, repeats),
        median([timed(lambda: _swept(run, at, per_layer)) for _ in range(repeats)]),
    )
    figures = {**line, "seconds": times.wall, "cpu_s": times.cpu, "read_s": read.wall}
    if short:
        return figures
    work = (8 if momentum else 4) * sum(d * d for d in dims) * rows / peak
    return {**figures, "share_of_peak": work / times.wall, "read_share_of_peak": work / read.wall}


def _swept(run: Run, at: int, per_layer: bool) -> None:
    """Embed and write nothing."""
    where = slices(RunStore.open(run.path), per_layer)
    made = [Propagator(w.stop - w.start, dtype=torch.float32, contraction="when_expanding") for w in where]
    layers = Layers(where)
    for chunk in backward(RunStore.open(run.path), at, dtype=torch.float32):
        for propagator, steps in zip(made, zip(*map(layers.cut, chunk.steps), strict=True), strict=True):
            propagator.embed(steps)


def _embedding(run: Run, at: int, per_layer: bool, repeats: int) -> Times:
    return median([timed(lambda: run.embed(at, per_layer=per_layer)) for _ in range(repeats)])


def _slopes(runs: dict[str, Run], work: Workload, repeats: int) -> list[dict[str, Any]]:
    """Per layer, steps as SGD: time and memory at some steps; time at another p, and with fewer layers."""
    whole, points = runs["SGD as a proxy"], steps_at(EPOCHS * work.epoch)
    lines = [
        {**_point("steps", at, _embedding(whole, at, False, repeats)), "peak_bytes": _memory(whole, at)}
        for at in points
    ]
    for name, what in (
        ("rank 16", "p"),
        ("SGD as a proxy", "p"),
        ("one block", "layers"),
        ("SGD as a proxy", "layers"),
    ):
        run = runs[name]
        value = max(RunStore.open(run.path).dims) if what == "p" else len(RunStore.open(run.path).dims)
        lines.append(_point(what, value, _embedding(run, work.epoch, False, repeats)))
    return with_exponents(lines)


def steps_at(epoch: int) -> Sequence[int]:
    """A sixteenth, a quarter, a half, and all."""
    return sorted({max(1, epoch // 16), max(1, epoch // 4), max(1, epoch // 2), epoch})


def _point(what: str, value: int, times: Times) -> dict[str, Any]:
    return {"against": what, "value": value, "seconds": times.wall, "cpu_s": times.cpu}


def with_exponents(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each line with the exponent k of seconds ∝ valueᵏ since the line before it of the same kind."""
    out: list[dict[str, Any]] = []
    for line in lines:
        before = next((x for x in reversed(out) if x["against"] == line["against"]), None)
        grown = before is not None and before["value"] != line["value"]
        slope = (
            log(line["seconds"] / before["seconds"]) / log(line["value"] / before["value"])
            if before and grown
            else None
        )
        out.append({**line, "exponent": slope})
    return out


def _memory(run: Run, at: int) -> int:
    result = in_child("experiments.bench.sweeping:embed_run", {"path": str(run.path), "at": at, "per_layer": True})
    return int(result["peak_bytes"])


def embed_run(path: str, at: int, per_layer: bool) -> dict[str, Any]:
    """What the child does."""
    return {"occurrences": Run(path).embed(at, per_layer=per_layer).occurrences}


def _free_memory() -> float:
    """Bytes that are free, or may be freed; without Linux's own count, as many as one likes."""
    file = Path("/proc/meminfo")
    if not file.exists():
        return float("inf")
    result = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("MemAvailable")]
    return 1024.0 * int(result[0])
