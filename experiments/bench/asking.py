"""From a recorded run to answers: index (embed) and ask, or ask by adjoint; recording excluded.

Query gradients are part of every question.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstory.run.run import Run
from experiments.bench.recording import CONFIGURATIONS, Say, quiet
from experiments.bench.timing import Times, interleave
from experiments.bench.training import Settings, recorded_run, sizes
from experiments.bench.workloads import SCALES, Workload, sample_losses

ASKED: dict[str, tuple[Settings, bool]] = {  # settings, and whether layers are taken as independent
    "default, joint": (CONFIGURATIONS["default"], False),
    "paper: random 32×32, empirical, per layer": (CONFIGURATIONS["paper: random 32×32, empirical"], True),
}


def bench_query(*, scale: str = "full", repeats: int = 3, say: Say = quiet) -> dict[str, Any]:
    """One line for each workload and configuration: one epoch recorded, all its samples scored on all queries."""
    rows: list[dict[str, Any]] = []
    for work in (SCALES[scale]["A"], SCALES[scale]["B"]):
        for name, (settings, per_layer) in ASKED.items():
            say(f"query: {work.words}, {work.n_queries} queries, {name}")
            with tempfile.TemporaryDirectory() as folder:
                run, model = recorded_run(work, Path(folder) / "run", settings, work.epoch)
                times = interleave(questions(run, model, work, per_layer), repeats)
                about = {"workload": work.words, "configuration": name}
                rows.append({**about, **_line(work, times), **sizes(run.path)})
    return {"threads": torch.get_num_threads(), "rows": rows}


def questions(run: Run, model: nn.Module, work: Workload, per_layer: bool) -> dict[str, Callable[[], object]]:
    """What is timed; `passes` are the queries' own forward and backward pass alone."""
    batch = work.queries()

    def passes() -> None:
        model.zero_grad()
        query_losses(model, batch).sum().backward()

    return {
        "passes": passes,
        "index": lambda: run.embed(per_layer=per_layer),
        "embeddings": lambda: run.query(model, query_losses, batch, method="embeddings", per_layer=per_layer),
        "adjoint": lambda: run.query(model, query_losses, batch, method="adjoint", per_layer=per_layer),
    }


def query_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss for each query."""
    return sample_losses(model(batch[0]), batch[1])


def _line(work: Workload, times: dict[str, Times]) -> dict[str, Any]:
    return {
        "queries": work.n_queries,
        **{f"{part}_s": t.wall for part, t in times.items()},
        **{f"{part}_cpu_s": t.cpu for part, t in times.items()},
        "query_over_passes": times["embeddings"].cpu / times["passes"].cpu,
        "index_and_query_s": times["index"].wall + times["embeddings"].wall,
    }
