"""An optimizer's state by names, and back."""

import copy
from typing import Any

import pytest
import torch
from tests.support import examples
from torch import nn

from backstory.capture.optimizer_state import load_optimizer_state, optimizer_bytes, optimizer_state
from backstory.errors import MismatchError
from backstory.replay.recipe import take_step


@pytest.mark.parametrize("kind", examples.KINDS)
def test_a_state_goes_into_another_optimizer(kind: str) -> None:
    there, here = examples.make(kind), examples.make(kind)
    for t in range(3):
        take_step(there, t)
    state = optimizer_state(there.model, there.optimizer)
    assert state is not None
    assert sum(x.nbytes for x in state.values()) == optimizer_bytes(there.optimizer)
    expected = copy.deepcopy(there.optimizer.state_dict())
    take_step(there, 3)  # copies do not move
    load_optimizer_state(here.model, here.optimizer, state)
    actual = here.optimizer.state_dict()
    assert actual["param_groups"] == expected["param_groups"]
    assert {i: set(x) for i, x in actual["state"].items()} == {
        i: {k for k, v in x.items() if v is not None}
        for i, x in expected["state"].items()
        if any(v is not None for v in x.values())
    }
    for i, entries in actual["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, expected["state"][i][key])


def test_in_another_precision_it_is_cast_and_counts_are_not() -> None:
    there, here = examples.make("adam"), examples.make("adam")
    take_step(there, 0)
    here.model.float()
    state = optimizer_state(there.model, there.optimizer)
    assert state is not None
    load_optimizer_state(here.model, here.optimizer, state)
    kinds = {k: v.dtype for x in here.optimizer.state.values() for k, v in x.items()}
    assert kinds == {"step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert next(iter(here.optimizer.state.values()))["step"] == 1


def test_numbers_are_kept_and_anything_else_is_not() -> None:
    model = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"count": 3, "none": None}
    state = optimizer_state(model, optimizer)
    assert state is not None
    assert {k: float(v) for k, v in state.items()} == {"weight/count": 3.0}
    optimizer.state[model.bias] = {"history": []}
    assert optimizer_state(model, optimizer) is None
    del optimizer.state[model.bias]
    optimizer.state[nn.Parameter(torch.zeros(1))] = {"count": 3}
    assert optimizer_state(model, optimizer) is None, "it has no name"


def test_another_model_is_refused() -> None:
    with pytest.raises(MismatchError, match="other, which the recipe's optimizer does not train"):
        made = examples.make()
        load_optimizer_state(made.model, made.optimizer, {"other/step": torch.ones(())})
