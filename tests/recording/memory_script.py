"""Embeds or asks a run, and prints how much memory that took.

python memory_script.py RUN embed|query CHUNK_BYTES
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import backstory
from backstory.run import sweep

WIDTH = 16 * 15 + 16


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(15, 16)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().sum(1)
    return out


def memory(name: str) -> int:
    """VmHWM (the peak) or VmRSS of this process in bytes. `ru_maxrss` would count the parent's pages before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def main(path: Path, what: str, chunk_bytes: int) -> None:
    torch.set_num_threads(1)
    sweep.CHUNK_BYTES = chunk_bytes
    run = backstory.open(path)
    run.query_gradients(torch.ones(2, WIDTH), at=1)  # what is loaded once, whatever the length
    before = memory("VmRSS")
    if what == "embed":
        run.embed()
    else:
        answer = run.query(make(), loss, torch.ones(2, 15), method="adjoint", unverified=True)
        assert answer.scores.isfinite().all()
    print(json.dumps({"before": before, "peak": memory("VmHWM")}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
