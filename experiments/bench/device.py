"""Recording on another device, such as a GPU: is it right there, and what does it cost? About 5 minutes.

Backstory was written and tested on CPUs. Each check takes the same small training run on the CPU and on the device, and
compares what was recorded and what a question answers; the last one times plain and recorded training in turns.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.errors import BackstoryError, UsageError
from backstory.run.run import Run
from backstory.store import RunStore
from experiments.bench.recording import compare
from experiments.bench.training import Recorded, Settings, recorded_run
from experiments.bench.workloads import SCALES, Workload, sample_losses

STEPS, WARMUP = 10, 6
ROUNDING = 2e-3  # largest difference over the largest value; float32, sums in another order
HALF = 5e-2  # the same for bfloat16
Say = Callable[[str], None]


def check_device(device: str, *, scale: str = "full", say: Say) -> dict[str, Any]:
    """`{"device", "torch", "checks": [{"check", "passed", "found"}], "recording": [...]}`."""
    _known(device)
    checks: dict[str, Callable[[], str]] = {
        "rows, SGD, random projection": lambda: _same_rows("A", device, {"projection": "random", "rank": 4}),
        "rows, AdamW, token means, random projection": lambda: _same_rows(
            "B", device, {"projection": "random", "rank": 4}
        ),
        "answers, AdamW, the default": lambda: _same_answers(device, {}),
        "answers, AdamW, sampled:1/6": lambda: _same_answers(device, {"curvature": "sampled:1/6"}),
        "rows, autocast in bfloat16": lambda: _compared(_autocast_rows, device, HALF),
    }
    result = []
    for name, check in checks.items():
        say(f"device: {name}")
        result.append({"check": name, **_outcome(check)})
    say(f"device: plain and recorded training on {device}, in turns")
    timed = [compare(replace(SCALES[scale][w], device=device), {"default": {}})[0] for w in "BC"]
    return {"device": _name(device), "torch": torch.__version__, "checks": result, "recording": timed}


def _known(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"torch cannot use the device {device!r} ({str(error).splitlines()[0]}). Choose one that "
            "torch.zeros(1, device=...) accepts, such as cuda."
        ) from error


def _name(device: str) -> str:
    return f"{device}: {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else device


def _outcome(check: Callable[[], str]) -> dict[str, Any]:
    """A failure of any kind is a finding: the report goes on."""
    try:
        return {"passed": True, "found": check()}
    except Exception as error:
        return {"passed": False, "found": f"{type(error).__name__}: {error}"}


def _small(name: str, device: str) -> Workload:
    return replace(SCALES["tiny"][name], device=device)


def _same_rows(name: str, device: str, settings: Settings) -> str:
    """The rows themselves."""

    def rows(where: str, path: Path) -> Tensor:
        return _rows(recorded_run(_small(name, where), path, {**settings, "encoding": "float32"}, STEPS)[0])

    return _compared(rows, device)


def _rows(run: Run) -> Tensor:
    """Gradient and curvature rows, (N, 1 + R, p)."""
    block = RunStore.open(run.path).read(0, run.n_occurrences, curvature=True)
    assert block.rows is not None
    rows = block.rows[:, None]
    return (rows if block.curvature is None else torch.cat([rows, block.curvature], 1)).double()


def _same_answers(device: str, settings: Settings) -> str:
    """What a question to the run answers."""
    return _compared(lambda where, path: _asked(where, path, settings), device)


def _asked(device: str, path: Path, settings: Settings) -> Tensor:
    work = _small("B", device)
    run, model = recorded_run(work, path, {"warmup_steps": WARMUP, **settings}, STEPS)
    answer = run.query(model, lambda net, batch: sample_losses(net(batch[0]), batch[1]), work.queries())
    return answer.scores.double().cpu()


def _autocast_rows(device: str, path: Path) -> Tensor:
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        loop = Recorded(_small("B", device), path, {"projection": "random", "rank": 4, "encoding": "float32"})
        try:
            loop.advance(1)  # in later steps the weights have moved apart
        finally:
            loop.close()
    return _rows(Run(path))


def _compared(make: Callable[[str, Path], Tensor], device: str, tolerance: float = ROUNDING) -> str:
    """The device's numbers beside the CPU's; on the CPU itself this shows only that everything runs."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = make("cpu", Path(folder) / "here"), make(device, Path(folder) / "there")
    off = float((here - there).abs().max() / here.abs().max())
    if not off < tolerance:
        raise BackstoryError(
            f"differs from the CPU by {off:.1e} of the largest value, more than the {tolerance:.0e} allowed."
        )
    return f"differs from the CPU by {off:.1e} of the largest value"
