"""The paper's efficiency table in one run of B: storage, highest memory and samples a second, Backstory and LoGRA.

Both keep 1,024 random coordinates of each layer and take layers as independent. LoGRA is the influence function of
`backstory.baselines` in random coordinates, at the initial weights (time does not depend on them), rows in memory. Every stage runs in a process of its own.
Samples a second: of storing with training, of storing alone, and of influence on all queries at once.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from backstory.baselines.curvature import by_rows
from backstory.baselines.gradients import gradients
from backstory.replay.recipe import Recipe
from backstory.run.run import Run
from experiments.bench.asking import query_losses
from experiments.bench.children import in_child
from experiments.bench.recording import Say, quiet
from experiments.bench.timing import timed
from experiments.bench.training import Recorded, sizes
from experiments.bench.workloads import SCALES, Workload

RANK = 32
DAMPING = 1e-3  # the paper's
SETTINGS = {"projection": "random", "rank": RANK, "curvature": "empirical"}
HERE = "experiments.bench.efficiency"


def bench_efficiency(*, scale: str = "full", say: Say = quiet) -> list[dict[str, Any]]:
    """One line for each stage."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"path": str(Path(folder) / "run"), "scale": scale}
        stages = [
            ("Backstory", "store rows while training", "store_rows", run),
            ("Backstory", "store embeddings", "store_embeddings", run),
            ("Backstory", "influence", "influence", run),
            ("LoGRA (backstory.baselines)", "store rows, one pass over the data", "logra_rows", {"scale": scale}),
            ("LoGRA (backstory.baselines)", "influence", "logra_influence", {"scale": scale}),
        ]
        lines = []
        for method, stage, function, values in stages:
            say(f"store: efficiency, {method}, {stage}")
            result = in_child(f"{HERE}:{function}", values)
            lines.append({"method": method, "stage": stage, **result})
    return [{**line, "samples_per_s": line["samples"] / line["work_s"]} for line in lines]


def store_rows(path: str, scale: str) -> dict[str, Any]:
    """One epoch of recorded training."""
    work = SCALES[scale]["B"]
    loop = Recorded(work, Path(path), {**SETTINGS, "checkpoints": 1, "steps": work.epoch})

    def train() -> None:
        loop.advance(work.epoch)
        loop.close()

    took = timed(train)
    result = sizes(Path(path))
    return {"samples": work.samples, "work_s": took.wall, "work_cpu_s": took.cpu} | {
        "storage_bytes": round(result["bytes_per_occurrence"] * result["occurrences"])
    }


def store_embeddings(path: str, scale: str) -> dict[str, Any]:
    """Embeddings of all occurrences, per layer."""
    took = timed(lambda: Run(path).embed(per_layer=True))
    kept = sum(f.stat().st_size for folder in Path(path).glob("emb-*") for f in folder.rglob("*") if f.is_file())
    return {"samples": SCALES[scale]["B"].samples, "work_s": took.wall, "work_cpu_s": took.cpu, "storage_bytes": kept}


def influence(path: str, scale: str) -> dict[str, Any]:
    """All queries at once by the embeddings."""
    work, run = SCALES[scale]["B"], Run(path)
    model = run.load_weights(work.start()[0])
    took = timed(lambda: run.query(model, query_losses, work.queries(), method="embeddings", per_layer=True))
    return {"samples": work.samples, "queries": work.n_queries, "work_s": took.wall, "work_cpu_s": took.cpu}


def logra_rows(scale: str) -> dict[str, Any]:
    """The rows that LoGRA keeps."""
    work = SCALES[scale]["B"]
    kept: list[torch.Tensor] = []
    took = timed(lambda: kept.append(gradients(recipe(work), rank=RANK).stack()))
    return {"samples": work.samples, "work_s": took.wall, "work_cpu_s": took.cpu, "storage_bytes": kept[0].nbytes}


def logra_influence(scale: str) -> dict[str, Any]:
    """Query gradients, and their products with the inverse Fisher and all rows: `influence_function` without its rows."""
    work = SCALES[scale]["B"]
    rows = gradients(recipe(work), rank=RANK)
    G = rows.stack()  # (N, p)

    def ask() -> None:
        V = rows.of(work.queries())  # (Q, p)
        torch.stack([by_rows(V[:, c], G[:, c], DAMPING * len(G)) for c in rows.slices]).sum(0)

    took = timed(ask)
    return {"samples": work.samples, "queries": work.n_queries, "work_s": took.wall, "work_cpu_s": took.cpu}


def recipe(work: Workload) -> Recipe:
    """The workload as other methods take it."""
    model, optimizer = work.start()
    x, y = work.data()
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=query_losses,
        batches=[(range(c.start, c.stop), (x[c], y[c])) for c in work.visits()],
        loss_reduction=work.loss_reduction,
        tokens=lambda batch: torch.full((len(batch[0]),), work.terms),
        clip_norm=1.0,
        queries={"queries": work.queries()},
    )
