"""The training runs that are timed, with seeded random data: A, an MLP; B, a small GPT; C, two wide layers; D, a larger GPT; E, a tiny one.

    A  MLP 784-128-10, ReLU, SGD, 6,000 samples, batch 64, mean loss, 100 queries
    B  GPT of 4 layers, width 128, 4 heads, sequence 128, vocabulary 2,048, AdamW, clipping 1.0, token mean,
       1,024 sequences, batch 16, 32 queries
    C  as B with 2 layers of width 768, 12 heads, batch 8
    D  as B with 5 layers of width 384, 6 heads, batch 8: 10 million parameters
    E  as B with 2 layers of width 48, sequence 48, vocabulary 256: 80,000 parameters, 100 steps in all

Each turn ends with a flush: what was recorded is committed and on disk. A's turns are 56 steps, about as many as the writer commits together
anyway, so that a commit for every 4 ms of training, which no user asks for, is not what is measured.
Speed does not depend on what the tokens say. Every call of `start` gives the same initial weights.
Shapes:  N samples, B of a batch, S positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


class Block(nn.Module):
    """A transformer block: attention and a feed-forward net, pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) -> the same."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, S, width / heads)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    """Tokens to the next token's logits; the head is apart from the embedding."""

    def __init__(self, *, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S) -> (B, S, vocabulary)."""
        places = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        h = self.tokens(x) + self.positions(places)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training run: sizes, and everything made from them by seeds."""

    name: str
    samples: int
    batch: int
    n_queries: int
    turn: int  # steps between two looks at the clock
    steps: int  # of a whole run
    layers: int = 0  # 0: the MLP
    width: int = 128
    heads: int = 4
    length: int = 128
    vocabulary: int = 2048
    inputs: int = 784
    classes: int = 10
    device: str = "cpu"

    @property
    def language(self) -> bool:
        """Whether samples are sequences with a loss at every position."""
        return self.layers > 0

    @property
    def terms(self) -> int:
        """Losses that a sample's own loss is the sum of."""
        return self.length if self.language else 1

    @property
    def loss_reduction(self) -> str:
        """As `backstory.record` calls it."""
        return "token-mean" if self.language else "mean"

    @property
    def epoch(self) -> int:
        """Steps of one pass over the samples."""
        return -(-self.samples // self.batch)

    @property
    def words(self) -> str:
        """The configuration, for a table."""
        if not self.language:
            return f"{self.name}: MLP {self.inputs}-{self.width}-{self.classes}, SGD, batch {self.batch}"
        return (
            f"{self.name}: GPT {self.layers} × {self.width}, sequence {self.length}, vocabulary {self.vocabulary:,}, "
            f"AdamW, clipping 1.0, batch {self.batch}"
        )

    def start(self) -> tuple[nn.Module, Optimizer]:
        """The model at its initial weights, and its optimizer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._model().to(self.device)
        if self.language:
            return model, torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def _model(self) -> nn.Module:
        if self.language:
            sizes = {"layers": self.layers, "width": self.width, "heads": self.heads}
            return GPT(vocabulary=self.vocabulary, length=self.length, **sizes)
        return nn.Sequential(nn.Linear(self.inputs, self.width), nn.ReLU(), nn.Linear(self.width, self.classes))

    def data(self) -> tuple[Tensor, Tensor]:
        """`(inputs, targets)` of all samples."""
        return self._draw(self.samples, seed=1)

    def queries(self) -> tuple[Tensor, Tensor]:
        """`(inputs, targets)` of the queries."""
        return self._draw(self.n_queries, seed=2)

    def _draw(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        if self.language:
            tokens = torch.randint(0, self.vocabulary, (n, self.length + 1), generator=g).to(self.device)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        result = torch.randn(n, self.inputs, generator=g), torch.randint(0, self.classes, (n,), generator=g)
        return result[0].to(self.device), result[1].to(self.device)

    def visits(self, steps: int | None = None) -> Iterator[slice]:
        """Which samples each step takes, in order, again and again."""
        for step in range(self.epoch if steps is None else steps):
            lo = step % self.epoch * self.batch
            yield slice(lo, min(lo + self.batch, self.samples))


def sample_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample (B,): the sum over its positions."""
    result = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return result.reshape(len(targets), -1).sum(1)


def train_step(work: Workload, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """One update, as users write it."""
    (sample_losses(model(x), y).sum() / (len(x) * work.terms)).backward()
    if work.language:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


A = Workload(name="A", samples=6000, batch=64, n_queries=100, turn=56, steps=1120)
B = Workload(name="B", samples=1024, batch=16, n_queries=32, turn=64, steps=320, layers=4)
C = Workload(name="C", samples=64, batch=8, n_queries=8, turn=16, steps=80, layers=2, width=768, heads=12)
D = Workload(name="D", samples=64, batch=8, n_queries=8, turn=16, steps=80, layers=5, width=384, heads=6)
E = Workload(
    name="E",
    samples=512,
    batch=16,
    n_queries=8,
    turn=25,
    steps=100,
    layers=2,
    width=48,
    heads=4,
    length=48,
    vocabulary=256,
)
FULL = {w.name: w for w in (A, B, C, D, E)}
TINY = {
    "A": replace(A, samples=24, batch=8, n_queries=3, turn=1, steps=6, inputs=6, width=5, classes=3),
    "B": replace(B, samples=12, batch=4, n_queries=2, turn=1, steps=6, layers=1, width=8, length=5, vocabulary=11),
    "C": replace(C, samples=8, batch=4, n_queries=2, turn=1, steps=6, layers=1, width=12, length=5, vocabulary=11),
    "D": replace(D, samples=8, batch=4, n_queries=2, turn=1, steps=6, layers=1, width=12, length=5, vocabulary=11),
    "E": replace(E, samples=8, batch=4, n_queries=2, turn=1, steps=6, layers=1, width=12, length=5, vocabulary=11),
}
SCALES = {"full": FULL, "tiny": TINY}
