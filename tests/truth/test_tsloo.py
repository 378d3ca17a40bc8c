"""Retraining: against closed forms on a quadratic, and against a hand-written loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import UsageError
from backstory.truth import Removal, tsloo

D = torch.float64


def make(momentum: float = 0.9, clip: float | None = None, reduction: str = "mean") -> Recipe:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=g, dtype=D), torch.randn(12, 1, generator=g, dtype=D)
    model = nn.Linear(3, 1, dtype=D)
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.fill_(-0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 5, 10, 2]]

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m(batch[0]), batch[1], reduction="none").squeeze(1)

    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=loss,
        batches=[(ids, (x[ids], y[ids])) for ids in order],
        clip_norm=clip,
        loss_reduction=reduction,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        queries={"one": (x[:1], y[:1])},
    )


def by_hand(removed: dict[int, set[int]], clip: float | None, reduction: str) -> float:
    """The same training as an ordinary loop, with the removed terms left out of the sum."""
    recipe = make(clip=clip, reduction=reduction)
    model = recipe.model
    for t, (ids, batch) in enumerate(recipe.batches):
        recipe.optimizer.zero_grad()
        losses = recipe.loss(model, batch)
        kept = [losses[i] for i, s in enumerate(ids) if int(s) not in removed.get(t, set())]
        (sum(kept, torch.zeros((), dtype=D)) / (len(ids) if reduction == "mean" else 1)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        recipe.optimizer.step()
        recipe.schedule.step()
    return float(recipe.loss(model, recipe.queries["one"]).detach())


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_removal_equals_a_hand_written_loop(clip: float | None, reduction: str) -> None:
    def query(model: nn.Module) -> Tensor:
        return make().loss(model, make().queries["one"])

    removals = [Removal((5,)), Removal((5,), steps=(3,)), Removal((0, 10)), Removal((11,))]
    gone = [{1: {5}, 3: {5}}, {3: {5}}, {0: {0}, 2: {10}, 3: {0, 10}}, {2: {11}}]
    found = tsloo(lambda: make(clip=clip, reduction=reduction), removals, query)
    base = by_hand({}, clip, reduction)
    expected = torch.tensor([by_hand(r, clip, reduction) - base for r in gone], dtype=D)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-10, atol=1e-14)
    assert bool((found.abs() > 1e-9).all())


def test_removing_what_never_occurred_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to remove"):
        tsloo(make, [Removal((99,))], lambda m: torch.zeros(1))


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    tsloo(make, [Removal((1,)), Removal((2,))], lambda m: torch.zeros(2), lambda a, b: seen.append((a, b)))
    assert seen == [(1, 2), (2, 2)]
