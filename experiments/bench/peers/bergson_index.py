"""Bergson: an index of projected gradients of the trained model's linear layers on disk, asked by inner products.

Its collector takes activations of three dimensions, so an MLP's samples become sequences of one position.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.bench.peers.harness import DIMS, Bench, linear_names, run, size_of
from experiments.bench.workloads import sample_losses


def measure(bench: Bench) -> None:
    """Train, index, ask."""
    package, work = import_module("bergson"), bench.work
    model: Any = bench.trained()
    model.device = torch.device("cpu")
    rows = import_module("datasets").Dataset.from_dict(
        {"input_ids": [[0]] * work.samples, "length": [1] * work.samples}
    )
    config = package.IndexConfig(run_path="index", projection_dim=DIMS)
    config.partial_run_path.mkdir(parents=True, exist_ok=True)
    rival = package.GradientCollector(
        model=model, data=rows, cfg=config, processor=package.GradientProcessor(projection_dim=DIMS)
    )

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return sample_losses(model(x if work.language else x[:, None]), y)

    def index() -> None:
        for ids, x, y in bench.batches():
            with rival.with_batch(None):
                outcome = losses(x, y)
                outcome.sum().backward()
                model.zero_grad()
            rival.process_batch(ids.tolist(), losses=outcome)
        rival.teardown()

    def ask() -> Tensor:
        made = package.Attributor(config.partial_run_path)
        with made.trace(model, None) as result:
            losses(*bench.queries).sum().backward()
        outcome: Tensor = result.scores
        return outcome

    bench.time("index", index)
    scores = bench.time("query", ask)
    bench.facts.update(
        configuration=f"random {DIMS}×{DIMS}, linear layers, inner products, no curvature, no time",
        dims=DIMS * DIMS * len(linear_names(model)), store_bytes=size_of(Path("index")) + size_of(config.partial_run_path),
        kept="on disk", finite=bool(torch.isfinite(scores).all()), shape=list(scores.shape),
    )  # fmt: skip


if __name__ == "__main__":
    run("bergson", measure)
