"""A workload's training loop, a few steps at a time: plain, or recorded by Backstory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstory.recording.recorder import record
from backstory.recording.step import StepScope
from backstory.run.run import Run
from backstory.store import RunStore
from experiments.bench.workloads import Workload, sample_losses, train_step

Settings = Mapping[str, Any]  # keywords of `backstory.record`


class Plain:
    """Training as users write it; goes on where it stopped."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.model, self.optimizer = work.start()
        self.data = work.data()
        self.at = 0

    def advance(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            lo = self.at % self.work.epoch * self.work.batch
            cut = slice(lo, min(lo + self.work.batch, self.work.samples))
            self.step(cut, self.data[0][cut], self.data[1][cut])
            self.at += 1
        if self.work.device != "cpu":
            torch.accelerator.synchronize()

    def step(self, cut: slice, x: Tensor, y: Tensor) -> None:
        """One update from the samples `cut`."""
        train_step(self.work, self.model, self.optimizer, x, y)


class Recorded(Plain):
    """The same loop with its steps recorded; what it took is on disk after each `advance`."""

    def __init__(self, work: Workload, path: Path, settings: Settings) -> None:
        super().__init__(work)
        self.outputs = "curvature" in settings or settings.get("preset") == "best"
        planned = None if work.language else work.steps  # a classifier's windows follow from it
        self.recorder = record(
            self.model, self.optimizer, path, loss_reduction=work.loss_reduction, steps=planned, **settings
        )
        self.recorder.__enter__()
        self._open = True

    def advance(self, steps: int) -> None:
        """Take so many steps, and wait for the disk."""
        super().advance(steps)
        self.recorder.flush()

    def step(self, cut: slice, x: Tensor, y: Tensor) -> None:
        """One recorded update from the samples `cut`."""
        with self.recorder.step(range(cut.start, cut.stop), tokens=[self.work.terms] * len(x)) as scope:
            (self._losses(scope, x, y).sum() / (len(x) * self.work.terms)).backward()
            if self.work.language:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _losses(self, scope: StepScope, x: Tensor, y: Tensor) -> Tensor:
        logits = self.model(x)
        if self.outputs:
            scope.outputs(logits, "cross-entropy")
        return sample_losses(logits, y)

    def close(self) -> None:
        """End the recording, once."""
        if self._open:
            self._open = False
            self.recorder.__exit__(None, None, None)


def recorded_run(work: Workload, path: Path, settings: Settings, steps: int) -> tuple[Run, nn.Module]:
    """Record a run of so many steps; it, and the trained model."""
    loop = Recorded(work, path, settings)
    try:
        loop.advance(steps)
    finally:
        loop.close()
    return Run(path), loop.model


def sizes(path: Path) -> dict[str, Any]:
    """What a closed run takes on disk: rows and steps for each occurrence, and what does not grow with the run."""
    run = Run(path)
    tables = sum(_size(path / name) for name in ("rows.lance", "steps.lance"))
    tables += sum(file.stat().st_size for file in path.glob("curvature-*"))
    rows, chosen = run.n_occurrences, run.config["settings"]
    return {
        "settings": f"{chosen['projection']}, rank {chosen['rank']}, {chosen['curvature']}, {chosen['encoding']}"
        + (", compressed" if "compressed" in run.config else ""),
        "occurrences": rows,
        "bytes_per_occurrence": tables / rows,
        "other_bytes": _size(path) - tables,
        "dims": run.width,
        "rows": 1
        if RunStore.open(run.path).curvature_rows == 0
        else RunStore.open(run.path).curvature_rows + (0 if _split(run) else 1),
        "curvature": chosen["curvature"],
        "projection": chosen["projection"],
        "encoding": chosen["encoding"],
    }


def _split(run: Run) -> bool:
    """Whether the gradient is the sum of the curvature rows, and not kept apart."""
    return not any(kind in run.config["settings"]["curvature"] for kind in ("sampled", "exact"))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
