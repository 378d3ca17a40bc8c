"""LogIX: LoGRA by its authors; gradients of the trained model's linear layers on disk, and the inverse of their Fisher."""

from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from experiments.bench.peers.harness import DIMS, Bench, linear_names, run, size_of
from experiments.bench.workloads import sample_losses


def measure(bench: Bench) -> None:
    """Train, index, ask."""
    model = bench.trained()
    layers = len(linear_names(model))
    rival = import_module("logix").LogIX("bench")
    rival.set_lora_config(import_module("logix.config").LoRAConfig(rank=DIMS))
    rival.watch(model)
    plan = import_module("logix.scheduler").LogIXScheduler(rival, lora="random", hessian="raw", save="grad")

    def log(ids: Tensor, x: Tensor, y: Tensor) -> None:
        with rival(data_id=[str(i) for i in ids.tolist()]):
            model.zero_grad()
            sample_losses(model(x), y).sum().backward()

    def index() -> None:
        for _ in plan:
            for batch in bench.batches():
                log(*batch)
            rival.finalize()

    def ask() -> Tensor:
        rival.eval()
        log(torch.arange(bench.work.n_queries), *bench.queries)
        result: Tensor = rival.compute_influence_all(rival.get_log(), rival.build_log_dataloader(batch_size=64))[
            "influence"
        ]
        return result

    bench.time("index", index)
    scores = bench.time("query", ask)
    assert scores.shape == (bench.work.n_queries, bench.work.samples), scores.shape
    bench.facts.update(
        configuration=f"random {DIMS}×{DIMS}, linear layers, per layer, no time",
        dims=DIMS * DIMS * layers, store_bytes=size_of(Path("logix/bench")), kept="on disk",
        finite=bool(torch.isfinite(scores).all()),
    )  # fmt: skip


if __name__ == "__main__":
    run("logix-ai", measure)
