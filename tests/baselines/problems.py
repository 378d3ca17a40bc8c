"""Small trained recipes in float64, and slow per-sample gradients: one forward and one backward pass each.

Nothing here imports `backstory.baselines`; only `recipe` makes a `backstory.Recipe`.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstory import Influence, Recipe

D = torch.float64
N = 30
Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


def data(n: int = N, classes: int = 3, features: int = 4, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=g, dtype=D)
    y = (
        x @ torch.randn(features, classes, generator=g, dtype=D) + torch.randn(n, classes, generator=g, dtype=D)
    ).argmax(1)
    return x, y


def mlp(seed: int = 0, classes: int = 3, features: int = 4) -> nn.Module:
    model = nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.copy_(0.6 * torch.randn(p.shape, generator=g, dtype=D))
    return model


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def order(n: int, size: int, epochs: int, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    out: list[list[int]] = []
    for _ in range(epochs):
        ids = torch.randperm(n, generator=g).tolist()
        out += [ids[i : i + size] for i in range(0, n, size)]
    return out


def recipe(
    model: nn.Module | None = None,
    *,
    loss: Loss = cross_entropy,
    xy: Batch | None = None,
    size: int = 6,
    epochs: int = 2,
    seed: int = 0,
    lr: float = 0.1,
    names: Callable[[int], int | str] = int,
) -> Recipe:
    """Samples `xy` in seeded order; the model is left as it is."""
    model = mlp() if model is None else model
    x, y = data() if xy is None else xy
    batches = [([names(i) for i in ids], (x[ids], y[ids])) for ids in order(len(x), size, epochs, seed)]
    return Recipe(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), loss=loss, batches=batches)


def queries(q: int = 5) -> Batch:
    return data(q, seed=9)


def rows(model: nn.Module, loss: Loss, xy: Sequence[Tensor]) -> Tensor:
    """(n, Σ numel): gradients of each sample's loss, by itself."""
    twin = copy.deepcopy(model).eval()
    out = []
    for i in range(len(xy[0])):
        twin.zero_grad()
        loss(twin, tuple(t[i : i + 1] for t in xy)).sum().backward()
        out.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in twin.parameters()]))  # fmt: skip
    return torch.stack(out)


def by_id(answer: Influence, n: int = N) -> Tensor:
    """Scores (Q, n) in the order of the ids 0 … n−1."""
    assert answer.sample_ids.shape == (n,)
    place = np.argsort(answer.sample_ids.astype(int))
    assert answer.sample_ids[place].tolist() == [str(i) for i in range(n)]
    return answer.scores[:, torch.from_numpy(place)]


def ratio(a: Tensor, b: Tensor) -> float:
    """Slope of a against b through 0."""
    return float((a * b).sum() / b.square().sum())


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def minimise(model: nn.Module, objective: Callable[[nn.Module], Tensor]) -> nn.Module:
    """A copy of `model` at the minimum of a convex objective, by Newton-like steps to 1e-12."""
    twin = copy.deepcopy(model)
    solver = torch.optim.LBFGS(
        twin.parameters(), lr=1.0, max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-18, line_search_fn="strong_wolfe"
    )  # fmt: skip

    def closure() -> Tensor:
        solver.zero_grad()
        value = objective(twin)
        value.backward()
        return value

    solver.step(closure)
    return twin
