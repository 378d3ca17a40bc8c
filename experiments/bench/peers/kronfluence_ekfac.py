"""Kronfluence: EK-FAC influence functions of the trained model's linear layers."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.bench.peers.harness import Bench, linear_names, run, size_of
from experiments.bench.workloads import sample_losses


def measure(bench: Bench) -> None:
    """Train, fit the factors, ask: every query goes over all training samples once more."""
    package, work = import_module("kronfluence"), bench.work
    model = bench.trained()
    names, dims = linear_names(model), sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))

    def loss(self: Any, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
        return sample_losses(model(batch[0]), batch[1]).sum()

    members = {
        "compute_train_loss": loss,
        "compute_measurement": lambda self, batch, model: loss(self, batch, model),
        "get_influence_tracked_modules": lambda self: names,
    }
    task = type("Task", (package.Task,), members)()
    rival = package.Analyzer(
        "bench", package.prepare_model(model, task), task, cpu=True, disable_tqdm=True, output_dir="ekfac"
    )
    training, asked = TensorDataset(bench.x, bench.y), TensorDataset(*bench.queries)
    factors = package.FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    bench.time(
        "index",
        lambda: rival.fit_all_factors("factors", training, per_device_batch_size=work.batch, factor_args=factors),
    )
    bench.time(
        "query",
        lambda: rival.compute_pairwise_scores(
            "scores", "factors", query_dataset=asked, train_dataset=training,
            per_device_query_batch_size=work.n_queries, per_device_train_batch_size=work.batch,
        ),
    )  # fmt: skip
    scores = rival.load_pairwise_scores("scores")["all_modules"]
    assert scores.shape == (work.n_queries, work.samples), scores.shape
    bench.facts.update(
        configuration="EK-FAC, linear layers, empirical Fisher, no time", dims=dims,
        store_bytes=size_of(Path("ekfac")), kept="on disk (factors, no rows)", finite=bool(torch.isfinite(scores).all()),
    )  # fmt: skip


if __name__ == "__main__":
    run("kronfluence", measure)
