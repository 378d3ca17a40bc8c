"""One model for each layer type and each way of using it; batches go in as tuples, the sample first."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from tests.support.loops import Batch, generator, normal, seeded
from torch import Tensor, nn


class Animal(NamedTuple):
    """A model and batches for it: `batch(step, size)`."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]


class Text(nn.Module):
    """Tokens and positions; positions are looked up once for the whole batch, as (S,) or as (1, S)."""

    def __init__(self, style: str = "(S,)", tied: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.style = style
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        at = torch.arange(tokens.shape[1])
        h = self.token(tokens) + self.position(at if self.style == "(S,)" else at[None])
        out: Tensor = self.head(self.norm(h.tanh()))
        return out


class Again(nn.Module):
    """One layer called three times, and a part of it a fourth time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = self.inner(h).tanh()
        out: Tensor = self.out(h + self.inner(x))
        return out


class InPlace(nn.Module):
    """Activations that overwrite the outputs of recorded layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.conv(x)).flatten(2).mean(2)
        out: Tensor = self.linear(h).mul_(2)
        return out


class Inner(nn.Module):
    """A module without a rule, inside: attention, or a recurrent layer; a token that belongs to no layer goes first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.start, self.inner, self.out = nn.Parameter(torch.randn(1, 1, 4)), inner, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.start.expand(len(x), -1, -1), x], 1)
        h = self.inner(h, h, h)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(h)[0]
        out: Tensor = self.out(h)
        return out


def floats(*shape: int) -> Callable[[int, int], Batch]:
    return lambda step, size: (normal(size, *shape, seed=300 + step),)


def tokens(*shape: int) -> Callable[[int, int], Batch]:
    return lambda step, size: (torch.randint(0, 7, (size, *shape), generator=generator(40 + step)),)


def _of(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: seeded(make())


ZOO: dict[str, Animal] = {
    "linear": Animal(_of(lambda: nn.Linear(3, 4)), floats(3)),
    "linear, no bias": Animal(_of(lambda: nn.Linear(3, 4, bias=False)), floats(3)),
    "linear, one sequence dimension": Animal(_of(lambda: nn.Linear(3, 4)), floats(5, 3)),
    "linear, two sequence dimensions": Animal(_of(lambda: nn.Linear(3, 4)), floats(2, 5, 3)),
    "conv1d, stride and padding": Animal(_of(lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1)), floats(3, 10)),
    "conv1d, dilation and groups": Animal(_of(lambda: nn.Conv1d(4, 6, 3, dilation=2, groups=2)), floats(4, 9)),
    "conv2d, all unequal": Animal(
        _of(lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)), floats(4, 7, 6)
    ),
    "conv2d, circular": Animal(
        _of(lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="circular")), floats(2, 6, 5)
    ),
    "conv2d, depthwise, same": Animal(
        _of(lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4, bias=False)), floats(4, 5, 4)
    ),
    "embedding": Animal(_of(lambda: nn.Embedding(7, 3)), tokens(6)),
    "embedding, one index each": Animal(_of(lambda: nn.Embedding(7, 3)), tokens()),
    "embedding, padding": Animal(_of(lambda: nn.Embedding(7, 3, padding_idx=2)), tokens(6)),
    "layer norm": Animal(_of(lambda: nn.LayerNorm(4)), floats(5, 4)),
    "layer norm, two dimensions": Animal(_of(lambda: nn.LayerNorm((5, 4))), floats(5, 4)),
    "layer norm, no bias": Animal(_of(lambda: nn.LayerNorm(4, bias=False)), floats(4)),
    "rms norm": Animal(_of(lambda: nn.RMSNorm(4)), floats(5, 4)),
    "group norm": Animal(_of(lambda: nn.GroupNorm(2, 4)), floats(4, 3, 2)),
    "group norm, no positions": Animal(_of(lambda: nn.GroupNorm(2, 4)), floats(4)),
    "batch norm in eval mode": Animal(_of(lambda: nn.BatchNorm2d(3).eval()), floats(3, 4, 2)),
    "positions (S,)": Animal(_of(lambda: Text("(S,)")), tokens(5)),
    "positions (1, S)": Animal(_of(lambda: Text("(1, S)")), tokens(5)),
    "tied weights": Animal(_of(lambda: Text("(1, S)", tied=True)), tokens(5)),
    "a module called several times": Animal(_of(Again), floats(3)),
    "attention and a bare token": Animal(
        _of(lambda: Inner(nn.MultiheadAttention(4, 2, batch_first=True))), floats(5, 4)
    ),
    "two layers of LSTM and a bare token": Animal(_of(lambda: Inner(nn.LSTM(4, 4, 2, batch_first=True))), floats(5, 4)),
    "transposed convolution": Animal(_of(lambda: nn.ConvTranspose1d(3, 2, 3, stride=2)), floats(3, 5)),
    "overwritten outputs": Animal(_of(InPlace), floats(2, 5, 4)),
}
