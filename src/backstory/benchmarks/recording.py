"""What recording costs: the same training steps, plain and recorded, in turn, disk included.

Knows nothing of the command line.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..session.recorder import Recorder
from ..session.recording import record
from .timing import interleave


class Block(nn.Module):
    """A transformer block: attention and a feed-forward net, pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) -> (B, S, width)."""
        b, s, width = x.shape
        q, k, v = (y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width)
        x = x + self.out(attended)
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


def bench_record(*, repeats: int = 7, steps: int = 3) -> dict[str, Any]:
    """Ratios of recorded to plain training, wall and CPU time, for each workload."""
    return {"threads": torch.get_num_threads(), "workloads": [_transformer(repeats, steps), _mlp(repeats, 10 * steps)]}


def _transformer(repeats: int, steps: int, width: int = 768, length: int = 128, batch: int = 8) -> dict[str, Any]:
    x, y = torch.randn(2, batch, length, width, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module) -> Tensor:
        return F.mse_loss(model(x), y, reduction="none").mean((1, 2)).mean()

    name = f"transformer block, width {width}, sequence {length}, batch {batch}, random 16×16"
    return _compare(name, lambda: Block(width, 12), loss, batch, repeats, steps, subspace="random", rank=16)


def _mlp(repeats: int, steps: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 784, generator=g), torch.randint(0, 10, (64,), generator=g)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(784, 128), nn.GELU(), nn.Linear(128, 10))

    name = "MLP 784-128-10, batch 64, random 16×16"
    return _compare(name, net, lambda m: F.cross_entropy(m(x), y), 64, repeats, steps, subspace="random", rank=16)


def _compare(
    name: str,
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module], Tensor],
    batch: int,
    repeats: int,
    steps: int,
    **settings: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    plain, recorded = make(), make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (plain, recorded)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with record(recorded, optimizers[1], run, loss_reduction="mean", **settings) as rec:

            def without() -> None:
                for _ in range(steps):
                    _step(plain, optimizers[0], loss)

            def with_recording() -> None:
                for _ in range(steps):
                    _recorded_step(rec, recorded, optimizers[1], loss, batch)
                rec.flush()

            times = interleave({"plain": without, "recorded": with_recording}, repeats)
            per_row = rec.store.bytes_per_row
    return {
        "name": name,
        "ratio": times["recorded"].wall / times["plain"].wall,
        "cpu_ratio": times["recorded"].cpu / times["plain"].cpu,
        "plain_ms_per_step": 1e3 * times["plain"].wall / steps,
        "recorded_ms_per_step": 1e3 * times["recorded"].wall / steps,
        "bytes_per_occurrence": per_row,
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]) -> None:
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def _recorded_step(
    rec: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor], batch: int
) -> None:
    with rec.step(range(batch)):
        loss(model).backward()
        optimizer.step()
    optimizer.zero_grad()
