"""Weights and modes come back."""

import pytest
import torch
from torch import nn

from backstory.capture.model_state import in_mode, load_weights, restored_weights
from backstory.errors import MismatchError


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_weights_come_back_after_an_error() -> None:
    model, other = mlp(0), mlp(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    weights = {f"module.{k}": v for k, v in other.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), restored_weights(model):
        load_weights(model, weights)
        assert torch.equal(model.state_dict()["0.weight"], other.state_dict()["0.weight"])
        raise RuntimeError("stop")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_other_weights_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"do not match the model: .*2\.weight"):
        load_weights(mlp(), {"0.weight": torch.zeros(1)})


@pytest.mark.parametrize("training", [False, True, None])
def test_modes_come_back(training: bool | None) -> None:
    model = mlp().train()
    model[0].eval()
    before = [True, False, True, True]
    with in_mode(model, training):
        assert [m.training for m in model.modules()] == (before if training is None else [training] * 4)
    assert [m.training for m in model.modules()] == before
