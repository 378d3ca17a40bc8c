"""Opacus: full per-sample gradients of every parameter in each training step, not projected and not kept.

It needs a bias in every LayerNorm: those of the model get one that stays zero and is not trained.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bench.peers.harness import Bench, run
from experiments.bench.workloads import train_step


def measure(bench: Bench) -> None:
    """Training with per-sample gradients beside plain training."""
    work = bench.work
    plain, optimizer = work.start()
    for norm in (m for m in plain.modules() if isinstance(m, nn.LayerNorm)):
        norm.bias = nn.Parameter(torch.zeros_like(norm.weight), requires_grad=False)
    model = import_module("opacus").GradSampleModule(plain)

    def recorded(ids: Tensor, x: Tensor, y: Tensor) -> None:
        train_step(work, model, optimizer, x, y)
        trained: list[Any] = [p for p in plain.parameters() if p.requires_grad]
        for p in trained:
            assert len(p.grad_sample) == len(x), "no gradient of each sample"
            p.grad_sample = None

    bench.side_by_side(recorded)
    dims = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    bench.facts.update(configuration="all parameters, full gradients", dims=dims, store_bytes=None, kept="nothing")


if __name__ == "__main__":
    run("opacus", measure)
