"""A run whose batches are augmented in the main process, with dropout: draws from torch, NumPy and Python between and inside its steps."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support import examples
from torch import nn

from backstory import Recipe, record

RATES = [0.02, 0.015, 0.01, 0.02, 0.005, 0.01, 0.02, 0.01]


class Augmented(Sequence[Any]):
    """Batches that are moved at random each time that they are fetched."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, t: Any) -> Any:
        ids, (x, y) = self._batches[t]
        return ids, (x + 0.1 * torch.randn_like(x) + 0.1 * np.random.rand(), y)


def make(seed: int = 0, decay: float = 0.3, dropout: float = 0.4, order: Sequence[int] = range(8)) -> Recipe:
    made = examples.make("adamw", clip=0.3, dropout=dropout)
    for group in made.optimizer.param_groups:
        group["weight_decay"] = decay
    torch.manual_seed(seed)
    batches = Augmented([made.batches[t] for t in order])
    return Recipe(
        model=made.model,
        optimizer=made.optimizer,
        loss=examples.loss,
        batches=batches,
        clip_norm=0.3,
        queries=made.queries,
    )


def trained(path: Path, *, checkpoints: int | None = 2, losses: bool = True, stop: int = 8) -> Recipe:
    """An ordinary loop, recorded: its rates are nobody's schedule, and an epoch begins in its middle."""
    made = make(seed=11)
    np.random.seed(5)
    steps = {"steps": 8, "checkpoints": checkpoints} if checkpoints is not None else {}
    with record(made.model, made.optimizer, path, loss_reduction="mean", projection="full", **steps) as rec:  # type: ignore[arg-type]
        for t in range(stop):
            if t == 4:
                random.random()
            ids, batch = made.batches[t]
            for group in made.optimizer.param_groups:
                group["lr"] = RATES[t]
            made.optimizer.zero_grad()
            with rec.step(ids) as s:
                each = examples.loss(made.model, batch)
                if losses:
                    s.losses(each)
                each.mean().backward()
                nn.utils.clip_grad_norm_(made.model.parameters(), 0.3)
                made.optimizer.step()
            random.sample(range(9), t % 2)  # an evaluation draws, now and then
    return made
