"""What the rivals' scripts share: the workload, the clock, the plain training beside it, one JSON line last.

A script is a function of a `Bench`; it times its parts by `bench.time("index", work)` and names its configuration.
Parts: record (training with the rival in the loop), index (what it does after training), query, and plain (the same
steps without it).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.bench.timing import Times, median, peak_bytes, total
from experiments.bench.timing import timed as timed_once
from experiments.bench.workloads import SCALES, Workload, train_step

T = TypeVar("T")
Batch = tuple[Tensor, Tensor, Tensor]  # sample numbers, inputs, targets
DIMS = 32  # coordinates of each side of a layer: 1,024 a layer


class Bench:
    """One rival on one workload."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.x, self.y = work.data()
        self.queries = work.queries()
        self.times: dict[str, Times] = {}
        self.facts: dict[str, Any] = {}

    def time(self, part: str, work: Callable[[], T]) -> T:
        """Run one part under the clock; parts of one name add up."""
        kept: list[T] = []
        once = timed_once(lambda: kept.append(work()))
        self.times[part] = total([self.times[part], once]) if part in self.times else once
        return kept[0]

    def batches(self, steps: int | None = None) -> Iterator[Batch]:
        """Those of one epoch, or of so many steps."""
        for cut in self.work.visits(steps):
            yield torch.arange(cut.start, cut.stop), self.x[cut], self.y[cut]

    def trained(self) -> nn.Module:
        """The model after one plain epoch, which is timed."""
        model, optimizer = self.work.start()
        self._plain(model, optimizer, list(self.batches(1)))  # what the first step builds is not counted
        self.time("plain", lambda: self._plain(model, optimizer, list(self.batches())))
        return model

    def _plain(self, model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
        for _, x, y in batches:
            train_step(self.work, model, optimizer, x, y)

    def side_by_side(self, recorded: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        """One epoch with the rival in the loop and one without, in turns; medians of the turns after the first."""
        model, optimizer = self.work.start()
        batches, size = list(self.batches()), self.work.turn
        outcome: dict[str, list[Times]] = {"plain": [], "record": []}
        for lo in range(0, len(batches), size):
            part = batches[lo : lo + size]
            plain = timed_once(partial(self._plain, model, optimizer, part))
            rival = timed_once(partial(_each, recorded, part))
            if len(part) == size:
                outcome["plain"].append(plain)
                outcome["record"].append(rival)
        for name, times in outcome.items():
            one, scale = median(times[1:] or times), self.work.epoch / size
            self.times[name] = Times(one.wall * scale, one.cpu * scale)

    def result(self) -> dict[str, Any]:
        """Plain values."""
        seconds = {f"{part}_s": t.wall for part, t in self.times.items()}
        cpu = {f"{part}_cpu_s": t.cpu for part, t in self.times.items()}
        return {**self.facts, **seconds, **cpu, "peak_bytes": peak_bytes()}


def _each(work: Callable[[Tensor, Tensor, Tensor], object], batches: Sequence[Batch]) -> None:
    for batch in batches:
        work(*batch)


def run(package: str, measure: Callable[[Bench], None]) -> None:
    """The script's main function."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="A")
    parser.add_argument("--scale", default="full")
    asked = parser.parse_args()
    bench = Bench(SCALES[asked.scale][asked.workload])
    measure(bench)
    bench.facts["version"] = version(package)
    sys.stdout.write("\n" + json.dumps(bench.result()) + "\n")


def linear_names(model: nn.Module) -> list[str]:
    """The layers that rivals cover."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def size_of(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
