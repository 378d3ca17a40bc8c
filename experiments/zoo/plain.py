"""Families made of torch's own layers, and of none."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .families import SAMPLES, WORDS, Family, Inputs, floats, generator, labels, squares, tokens

WIDTH, STEPS = 6, 5


class Tagger(nn.Module):
    """Embedding, a layer over the sequence, and a head; the layer may have the batch second."""

    def __init__(self, make: Callable[[], nn.Module], first: bool = True) -> None:
        super().__init__()
        self.words, self.inner, self.first = nn.Embedding(WORDS, WIDTH), make(), first
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.words(x if self.first else x.T)
        h = self.inner(h, h, h) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(h)
        h = h[0] if isinstance(h, tuple) else h
        return torch.tanh(self.head(h)).mean(1 if self.first else 0)


class Packed(nn.Module):
    """An LSTM over sequences of unequal lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.LSTM(WIDTH, 4, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        lengths = (x != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        out: Tensor = self.head(self.inner(packed)[1][0][-1])
        return out


class Graph(nn.Module):
    """Two layers of graph attention on dense adjacencies, its weights bare."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.score = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(2 * WIDTH))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = x @ self.into  # (B, nodes, d)
        near = torch.exp(-(h[:, :, None] - h[:, None]).square().mean(-1)) > 0.3
        both = torch.cat([h[:, :, None].expand(-1, -1, h.shape[1], -1), h[:, None].expand(-1, h.shape[1], -1, -1)], -1)
        weight = (both @ self.score).masked_fill(~near, -1e9).softmax(-1)
        out: Tensor = self.out((weight @ h).tanh().mean(1))
        return out


class Experts(nn.Module):
    """A mixture of experts as people write it: each is called with the tokens that go to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.words(x)
        out: Tensor = self.head((h + self.mixed(h)).mean(1))
        return out

    def mixed(self, h: Tensor) -> Tensor:
        """What the experts make of each token."""
        flat = h.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == k)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view_as(h)


class Residual(nn.Module):
    """A small ResNet as in many a course."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.head = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.norm(self.stem(x)).relu()
        h = (h + self.norm2(self.second(self.norm1(self.first(h)).relu()))).relu()
        out: Tensor = self.head(h.mean((2, 3)))
        return out


def words(seed: int) -> Inputs:
    """(B, S)."""
    return {"x": tokens(seed, STEPS)}


def padded(seed: int) -> Inputs:
    """Of unequal lengths, zeros at the end."""
    x = tokens(seed, STEPS)
    for z, length in enumerate((5, 2, 4, 3)):
        x[z, length:] = 0
    return {"x": x}


def square(seed: int) -> Inputs:
    """As many words as samples."""
    return {"x": tokens(seed, SAMPLES)}


def tagger(make: Callable[[], nn.Module], first: bool = True) -> Callable[[], nn.Module]:
    """With its head's width known."""

    def made() -> nn.Module:
        model = Tagger(make, first).double()
        model.eval()(tokens(0, STEPS))
        return model.train()

    return made


def bagged(seed: int) -> Inputs:
    """Indices and their weights."""
    return {**words(seed), "w": torch.rand(SAMPLES, STEPS, generator=generator(seed), dtype=torch.float64)}


class Clipped(nn.Module):
    """A table whose rows are renormalised while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.words(x).mean(1))
        return out


class Bag(nn.Module):
    """Weighted sums of rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(WORDS, WIDTH, mode="sum"), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.head(self.words(x, per_sample_weights=w))
        return out


def plain() -> dict[str, Family]:
    """torch.nn's own."""
    wide: dict[str, Any] = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 8}
    inner: dict[str, Any] = {
        "nn.LSTM": lambda: nn.LSTM(WIDTH, 4, 2, batch_first=True, bidirectional=True),
        "nn.GRU": lambda: nn.GRU(WIDTH, 4, batch_first=True),
        "nn.RNN": lambda: nn.RNN(WIDTH, 4, batch_first=True),
        "nn.MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        "nn.TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**wide, batch_first=True), 2, enable_nested_tensor=False),
    }  # fmt: skip
    second: dict[str, Any] = {
        "nn.LSTM, sequence first": lambda: nn.LSTM(WIDTH, 4),
        "nn.TransformerEncoder, sequence first": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**wide), 2, enable_nested_tensor=False),
    }  # fmt: skip
    made = {name: Family(tagger(make), words, labels) for name, make in inner.items()}
    made |= {name: Family(tagger(make, False), words, labels) for name, make in second.items()}
    name = "nn.TransformerEncoder, sequence first"
    made[f"{name}, batch = length"] = Family(tagger(second[name], False), square, labels)
    return made | {
        "nn.LSTM, packed": Family(Packed, padded, labels),
        "nn.Embedding with max_norm": Family(Clipped, words, labels, remedy={"layers": ["!words"]}),
        "nn.EmbeddingBag": Family(Bag, bagged, labels),
        "autoencoder with ConvTranspose2d": Family(
            lambda: nn.Sequential(nn.Conv2d(2, 4, 3, 2), nn.GELU(), nn.ConvTranspose2d(4, 2, 3, 2)), floats(2, 7, 7, name="input"), squares
        ),
        "nn.Conv3d": Family(
            lambda: nn.Sequential(nn.Conv3d(2, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(3 * 8, 3)), floats(2, 4, 4, 4, name="input"), labels
        ),
        "graph attention": Family(Graph, floats(5, 4), labels),
        "mixture of experts by hand": Family(Experts, words, labels),
        "ResNet with BatchNorm by hand": Family(Residual, floats(3, 6, 6), labels, copies=True),
    }  # fmt: skip
