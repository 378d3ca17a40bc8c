"""dattri's DVEmb: the paper's Algorithm 1, all linear layers in one matrix, gradients by a second backward pass."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.bench.peers.harness import DIMS, Bench, linear_names, run
from experiments.bench.workloads import sample_losses, train_step


def measure(bench: Bench) -> None:
    """Record beside plain training, embed, ask."""
    work = bench.work
    model, optimizer = work.start()
    rate = float(optimizer.param_groups[0]["lr"]) / work.terms
    layers = len(linear_names(model))

    def loss(model: nn.Module, batch: Any, device: Any) -> Tensor:
        return sample_losses(model(batch[0]), batch[1]).mean()

    task = import_module("dattri.task").AttributionTask(loss, model, model.state_dict())
    rival = import_module("dattri.algorithm.dvemb").DVEmbAttributor(
        task, proj_dim=DIMS * DIMS * layers, factorization_type="kronecker"
    )

    def recorded(ids: Tensor, x: Tensor, y: Tensor) -> None:
        rival.cache_gradients(0, (x, y), ids, rate)
        model.zero_grad()
        train_step(work, model, optimizer, x, y)

    bench.side_by_side(recorded)
    bench.time("index", rival.cache)
    asked = DataLoader(TensorDataset(*bench.queries), batch_size=work.n_queries)
    scores = bench.time("query", lambda: rival.attribute(asked))
    assert scores.shape == (work.samples, work.n_queries), scores.shape
    kept = sum(e.numel() * e.element_size() for e in rival.embeddings.values())
    bench.facts.update(
        configuration=f"random {DIMS}×{DIMS}, linear layers, per_layer, SGD as a proxy",
        dims=DIMS * DIMS * layers, store_bytes=kept, kept="in memory",
        finite=bool(torch.isfinite(scores).all()),
    )  # fmt: skip


if __name__ == "__main__":
    run("dattri", measure)
