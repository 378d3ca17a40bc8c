"""What shrinking removals say about kinks."""

from functools import partial

import pytest
import torch
from experiments.small.kink_share import kink_share
from tests.support import examples
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import UsageError
from backstory.replay.tape import Removal

D = torch.float64
REMOVALS = [Removal((s,)) for s in range(6)]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_smooth_net_has_no_kinks(kind: str) -> None:
    found = kink_share(partial(examples.make, kind), REMOVALS, "q")
    assert found.kinks < 0.03, found
    assert found.gaps[0] > 0.01
    assert found.smooth == pytest.approx(1 - found.kinks)
    assert found.as_dict()["factors"] == (1.0, 0.1, 0.01)


def toy(start: float = 0.5, target: float = -2.0) -> Recipe:
    """Sample 0 takes w from 0.5 to just below 0, where ReLU is silent to sample 1: any removal wakes it up."""
    model = nn.Linear(1, 1, bias=False, dtype=D)
    with torch.no_grad():
        model.weight.fill_(start)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (torch.relu(m(batch[0])) - batch[1]).squeeze(1) ** 2

    def one(name: int, y: float) -> tuple[list[int], tuple[Tensor, Tensor]]:
        return [name], (torch.ones(1, 1, dtype=D), torch.full((1, 1), y, dtype=D))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model=model, optimizer=optimizer, loss=loss, batches=[one(0, target - 1e-4), one(1, 1.0)])


def query(model: nn.Module) -> Tensor:
    return (next(model.parameters()) - 1).square().reshape(-1)


def test_a_kink_that_is_crossed_is_seen() -> None:
    found = kink_share(toy, [Removal((0,))], query)
    assert found.kinks > 0.5, found
    away = kink_share(partial(toy, start=2.0), [Removal((0,))], query)
    assert away.kinks < 0.03, away


def test_no_gap_means_no_kinks() -> None:
    def linear(model: nn.Module) -> Tensor:
        return next(model.parameters()).reshape(-1)

    last = kink_share(partial(toy, start=2.0), [Removal((1,))], linear)
    assert last.kinks == 0.0
    assert last.gaps[0] < 1e-9


@pytest.mark.parametrize("factors", [(1.0,), (2.0, 0.1), (1.0, 0.0)])
def test_factors_must_shrink(factors: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="factors"):
        kink_share(examples.make, REMOVALS, "q", factors)
