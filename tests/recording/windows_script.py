"""A training with windows that kills itself at one of its commits and can be started again: it goes on from its own last checkpoint.

python windows_script.py RUN CHECKPOINT COMMIT        COMMIT counts writes to the tables of the run; 0: it is not killed
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.recording import kill_script
from torch import nn

import backstory
from backstory.recording import settings
from backstory.store import tables

STEPS, EVERY = 22, 3


def main(run: Path, own: Path, commit: int) -> None:
    settings.Curvature.wanted = property(lambda self: (4, 32, 6))  # type: ignore[assignment,method-assign]
    if commit:
        die_at(commit)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = kill_script.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start, points = kill_script.load(own, model, optimizer), kill_script.Points()
    with backstory.record(
        model, optimizer, run, loss_reduction="mean", curvature="empirical", rank=2, warmup_steps=3, encoding="float64",
        resume=(run / "config.json").exists(), start=start,
    ) as rec:  # fmt: skip
        for t in range(start, STEPS):
            ids = kill_script.batches(0)[t]
            x, y = (torch.stack([torch.as_tensor(points[i][k]) for i in ids]) for k in (0, 1))
            optimizer.zero_grad()
            with rec.step(ids):
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            if (t + 1) % EVERY == 0:
                rec.flush()
                kill_script.save(own, t + 1, model, optimizer)
        if commit:  # it never ends in peace
            os.kill(os.getpid(), signal.SIGKILL)


def die_at(commit: int) -> None:
    """Before the rows of a step, or between them and its line in `steps`."""
    real, count = tables.Table.append, 0

    def append(self: tables.Table, table: Any) -> None:
        nonlocal count
        count += 1
        if count == commit:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, table)

    tables.Table.append = append  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
