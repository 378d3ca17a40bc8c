"""Weights and modes come back."""

import pytest
import torch
from tests.baselines.problems import mlp

from backstory.baselines.models import evaluated, loaded
from backstory.errors import MismatchError


def test_weights_come_back_after_an_error() -> None:
    model, other = mlp(0), mlp(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights = {f"module.{k}": v for k, v in other.state_dict().items()}

    def fail() -> None:
        with loaded(model, weights):
            assert torch.equal(model.state_dict()["0.weight"], other.state_dict()["0.weight"])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_other_weights_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"2\.weight"), loaded(mlp(), {"0.weight": torch.zeros(1)}):
        pass


def test_modes_come_back() -> None:
    model = mlp().train()
    model[0].eval()  # type: ignore[index]
    with evaluated(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == [True, False, True, True]
