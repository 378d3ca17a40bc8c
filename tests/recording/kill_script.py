"""A training program that may be killed at any moment and started again: it goes on from its own last checkpoint.

    python kill_script.py RUN CHECKPOINT PAUSE

With PAUSE seconds in each step, and "recording" in the file CHECKPOINT.log once steps are being taken.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import backstory

STEPS, SAMPLES, BATCH, EVERY = 60, 30, 3, 3


class Points(Dataset[tuple[Tensor, int]]):
    """Noise with a class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(5, generator=torch.Generator().manual_seed(i), dtype=torch.float64), i % 3


def batches(start: int) -> list[list[int]]:
    """The samples of each step from `start` on."""
    order: list[int] = []
    for epoch in range(STEPS * BATCH // SAMPLES + 1):
        order += torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[t * BATCH : (t + 1) * BATCH] for t in range(start, STEPS)]


def net() -> nn.Module:
    """5 -> 6 -> 3."""
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def main(run: Path, own: Path, pause: float, workers: int = 2) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = load(own, model, optimizer)
    resume = (run / "config.json").exists()
    loader = DataLoader(backstory.with_ids(Points()), batch_sampler=batches(start), num_workers=workers)
    with backstory.record(
        model, optimizer, run, loss_reduction="mean", projection="learned", rank=2, warmup_steps=7, encoding="float64",
        resume=resume, start=start,
    ) as rec:  # fmt: skip
        own.with_suffix(".log").write_text("recording")
        for t, (ids, x, y) in enumerate(loader, start):
            optimizer.zero_grad()
            with rec.step(ids):
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            time.sleep(pause)
            if (t + 1) % EVERY == 0:
                rec.flush()  # so that the run never lags behind the checkpoint
                save(own, t + 1, model, optimizer)


def load(own: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not own.exists():
        return 0
    state = torch.load(own)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(own: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, own.with_suffix(".tmp"))
    os.replace(own.with_suffix(".tmp"), own)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
