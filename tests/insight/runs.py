"""Small recorded runs of an MLP on nine samples, in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support.loops import Batch, batch_of, cross_entropy, ids_of, mlp, normal, sgd
from torch import nn

import backstory
from backstory.run.run import Run

STEPS = 12
SOURCES = ("books", "web", "code")


class Small(NamedTuple):
    """A run, its trained model, and a few queries."""

    run: Run
    model: nn.Module
    queries: Batch


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    wide, thin = ([p for p in model.parameters() if (p.dim() > 1) == w] for w in (True, False))
    groups = [{"params": wide, "lr": 0.2, "momentum": 0.9}, {"params": thin, "lr": 0.1, "weight_decay": 0.2}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.5)


RUNS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any], float | None]] = {
    "sgd": (lambda m: sgd(m, 0.3), {}, None),
    "sgd, exact curvature": (lambda m: sgd(m, 0.3), {"curvature": "exact:2"}, None),
    "momentum, decay, clipped": (lambda m: sgd(m, 0.3, momentum=0.9, weight_decay=0.1), {}, 0.1),
    "nesterov": (lambda m: sgd(m, 0.1, momentum=0.9, nesterov=True), {"projection": "random", "rank": 2}, None),
    "groups": (grouped, {}, 0.2),
    "adamw, diagonal": (adamw, {}, None),
    "adamw, preconditioned, clipped": (
        adamw,
        {"projection": "learned", "rank": 2, "warmup_steps": 3, "curvature_of": "steps"},
        0.1,
    ),
    "adamw, windows, clipped": (
        adamw,
        {"projection": "learned", "rank": 2, "warmup_steps": 3, "curvature": "empirical"},
        0.1,
    ),
}


def small(name: str, path: Path) -> Small:
    """One of `RUNS`; the learning rate falls linearly."""
    make, settings, max_norm = RUNS[name]
    model = mlp()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / (2 * STEPS))
    told = {
        "loss_reduction": "mean",
        "projection": "full",
        "encoding": "float64",
        "steps": STEPS,
        "checkpoints": 2,
        **settings,
    }
    with backstory.record(model, optimizer, path, **told) as rec:
        for t in range(STEPS):
            ids = ids_of(t)
            optimizer.zero_grad()
            with rec.step() as s:
                s.batch(ids)
                x, y = batch_of(ids)
                out = model(x)
                s.outputs(out, "cross-entropy")
                losses = nn.functional.cross_entropy(out, y, reduction="none")
                s.losses(losses)
                losses.mean().backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
            schedule.step()
    run = backstory.open(path)
    ids = list(range(9))
    run.describe(
        ids,
        text=[f"sample {i} likes {SOURCES[i % 3]}" for i in ids],
        source=[SOURCES[i % 3] for i in ids],
        label=[i % 2 for i in ids],
    )
    return Small(run, model, queries())


def queries() -> Batch:
    return normal(4, 3, seed=3), torch.tensor([0, 1, 1, 0])


loss = cross_entropy
