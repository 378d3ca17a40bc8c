"""Small runs for the tests of the store."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import backstory
from backstory.store import RunStore, StepRecord

LAYERS = [("first", 5), ("second", 7)]
WIDTH = 12
KEYS = ("rate", "l2", "decay", "momentum", "tau", "a", "n")
SOURCE = str(Path(backstory.__path__[0]).parent)


def record(step: int, *, width: int = WIDTH, size: int | None = None, n_groups: int = 2) -> StepRecord:
    """Step `step` of the one imaginary run; 1 to 3 samples unless told otherwise."""
    B = 1 + step % 3 if size is None else size
    g = torch.Generator().manual_seed(step)
    numbers = torch.randn(3, B, generator=g, dtype=torch.float64)
    loss = numbers[1].clone()
    loss[:1] = torch.nan
    return StepRecord(
        step=step,
        samples=[f"sample-{step}-{i}" for i in range(B)],
        weight=numbers[0],
        loss=loss,
        gdot=numbers[2],
        rows=torch.randn(B, width, generator=g, dtype=torch.float64),
        groups={key: [step + k / 10 + i / 100 for i in range(n_groups)] for k, key in enumerate(KEYS)},
        clip=1.0 / (step + 1),
        norm=float(step),
        coverage=0.5,
    )


def records(lo: int, hi: int) -> list[StepRecord]:
    return [record(t) for t in range(lo, hi)]


def rows_of(lo: int, hi: int) -> Tensor:
    return torch.cat([record(t).rows for t in range(lo, hi)]) if hi > lo else torch.zeros(0, WIDTH, dtype=torch.float64)


def new_run(path: Path, n_steps: int = 0, encoding: str = "float64") -> RunStore:
    store = RunStore.create(path, layers=LAYERS, encoding=encoding, n_groups=2, config={"seed": 3})
    if n_steps:
        store.append(records(0, n_steps))
    return store


def split_record(step: int, rows: int = 3) -> StepRecord:
    """The same step with curvature rows whose sum is its gradient row."""
    plain = record(step)
    B, g = len(plain.samples), torch.Generator().manual_seed(1000 + step)
    h = torch.randn(B, rows, WIDTH, generator=g, dtype=torch.float64)
    kappa, hdot = torch.randn(2, B, rows, generator=g, dtype=torch.float64)
    return replace(plain, rows=h.sum(1), curvature=h, kappa=kappa, hdot=hdot)


def split_run(path: Path, n_steps: int = 0, encoding: str = "float64") -> RunStore:
    """A run of `split_record`s."""
    made = {"layers": LAYERS, "encoding": encoding, "n_groups": 2, "config": {}}
    store = RunStore.create(path, **made, curvature_rows=3, split=True)  # type: ignore[arg-type]
    store.append([split_record(t) for t in range(n_steps)])
    return store


def diagonal_record(step: int) -> StepRecord:
    """The same step with the optimizer's diagonal, a size and a drift."""
    P = torch.rand(WIDTH, generator=torch.Generator().manual_seed(2000 + step), dtype=torch.float64) + 0.5
    return replace(record(step), P=P, size=2.5 * step, drift=0.125 * step)


def diagonal_run(path: Path, n_steps: int = 0) -> RunStore:
    """A run of `diagonal_record`s."""
    store = RunStore.create(path, layers=LAYERS, encoding="float64", n_groups=2, config={}, diagonal=True)
    store.append([diagonal_record(t) for t in range(n_steps)])
    return store


def python(code: str, *args: object) -> "subprocess.Popen[str]":
    """A new Python process that runs `code`, able to import these builders; end it with `communicate`."""
    head = f"import sys; sys.path[:0] = [{SOURCE!r}, {str(Path(__file__).parents[2])!r}]\n"
    command = [sys.executable, "-W", "error", "-c", head + code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
