"""dattri's LoGRA: projected gradients of the trained model's linear layers, and the inverse of their Fisher.

Without CUDA its store on disk does not run (it pins memory), so rows stay in memory.
"""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from experiments.bench.peers.harness import DIMS, Bench, linear_names, run
from experiments.bench.workloads import sample_losses


class WithLoss(nn.Module):
    """The model with its loss inside: what the rival asks of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        """An object with the summed loss."""
        return SimpleNamespace(loss=sample_losses(self.model(x), y).sum())


class Named(Dataset[dict[str, Tensor]]):
    """Samples as dicts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


def measure(bench: Bench) -> None:
    """Train, index, ask."""
    work = bench.work
    model = WithLoss(bench.trained())
    warm = made(model)  # compiles its hooks, which is not counted
    few, asked = Named(bench.x[: 2 * work.batch], bench.y[: 2 * work.batch]), Named(*bench.queries)
    warm.cache(DataLoader(few, batch_size=work.batch))
    warm.attribute(DataLoader(few, batch_size=work.batch), DataLoader(asked, batch_size=work.n_queries))
    Path("batch_metadata.json").unlink(missing_ok=True)
    rival, training = made(model), DataLoader(Named(bench.x, bench.y), batch_size=work.batch)
    bench.time("index", lambda: rival.cache(training))
    questions = DataLoader(asked, batch_size=work.n_queries)
    scores = bench.time("query", lambda: rival.attribute(training, questions))
    assert scores.shape == (work.samples, work.n_queries), scores.shape
    dims = DIMS * DIMS * len(linear_names(model))
    bench.facts.update(
        configuration=f"random {DIMS}×{DIMS}, linear layers, per layer, no time; compilation not counted",
        dims=dims, store_bytes=4 * dims * work.samples, kept="in memory",
        finite=bool(torch.isfinite(scores).all()),
    )  # fmt: skip


def made(model: nn.Module) -> Any:
    """The rival's attributor."""

    def loss(model: nn.Module, batch: Any, device: Any) -> Tensor:
        result: Tensor = model(**batch).loss
        return result

    task = import_module("dattri.task").AttributionTask(loss, model, model.state_dict())
    return import_module("dattri.algorithm.logra").LoGraAttributor(
        task, proj_dim=DIMS * DIMS, offload="cpu", damping=1e-3
    )


if __name__ == "__main__":
    run("dattri", measure)
