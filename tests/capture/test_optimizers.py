"""The table of optimizers: by type, by what a subclass inherits, and people's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import FULL, batch_of, cross_entropy, ids_of, mlp, one_step
from tests.support.oracles import assert_same
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import backstory
from backstory.capture import optimizers
from backstory.capture.optimizers import OPTIMIZERS, StepCoefficients, rule_of
from backstory.errors import UnsupportedError, UsageError

STEPS = 6


class HeavyBall(Optimizer):
    """SGD with momentum 0.8 as somebody writes it by hand, with a buffer of another name."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                ball = self.state[p].setdefault("ball", torch.zeros_like(p))
                ball.mul_(0.8).add_(p.grad)
                p.sub_(group["lr"] * ball)


def read(optimizer: Optimizer, group: Any) -> StepCoefficients:
    return StepCoefficients(rate=group["lr"], momentum=0.8)


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is before anything is registered, and again afterwards."""
    monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(OPTIMIZERS))


def scores(path: Path, kind: Any, **settings: Any) -> Tensor:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    with backstory.record(model, optimizer, path, loss_reduction="mean", **FULL) as rec:
        for t in range(STEPS):
            one_step(rec, model, optimizer, ids_of(t))
    return backstory.open(path).query(model, cross_entropy, batch_of([0, 1, 2])).scores


@pytest.mark.usefixtures("_table")
def test_a_registered_optimizer_is_followed_as_it_steps(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"HeavyBall is not supported.*register_optimizer"):
        scores(tmp_path / "refused", HeavyBall)
    backstory.register_optimizer(HeavyBall, read)
    actual, expected = scores(tmp_path / "own", HeavyBall), scores(tmp_path / "torch", SGD, momentum=0.8)
    assert_same(actual, expected, STEPS * 100)
    backstory.register_optimizer(HeavyBall, lambda optimizer, group: StepCoefficients(rate=group["lr"]))
    assert (scores(tmp_path / "wrong", HeavyBall) - expected).norm() > 0.01 * expected.norm()


class Named(AdamW):
    """Steps as AdamW does."""


class Other(SGD):
    """Steps in a way of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Twice."""
        super().step()
        super().step()


@pytest.mark.usefixtures("_table")
def test_a_subclass_is_what_it_inherits_its_step_from() -> None:
    parameter = [torch.nn.Parameter(torch.ones(2))]
    assert rule_of(Named(parameter)) is OPTIMIZERS[AdamW]
    assert rule_of(Other(parameter, lr=0.1)) is None
    backstory.register_optimizer(Other, read)
    assert rule_of(Other(parameter, lr=0.1)) is not None


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="must be a subclass of"):
        backstory.register_optimizer(torch.nn.Linear, read)  # type: ignore[arg-type]
