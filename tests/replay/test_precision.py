"""A recipe in another precision."""

from typing import NamedTuple

import torch
from tests.support import examples
from torch import Tensor

from backstory.replay.precision import convert, in_precision


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_every_floating_tensor_of_a_batch_is_converted() -> None:
    x, y = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    found = convert({"a": (x, y), "b": [x, "text", 3], "c": Pair(x, y)}, torch.float64)
    assert found["a"][0].dtype == found["b"][0].dtype == found["c"].x.dtype == torch.float64
    assert found["a"][1].dtype == found["c"].y.dtype == torch.long
    assert found["b"][1:] == ["text", 3]
    assert isinstance(found["c"], Pair)
    assert convert(x, None) is x


def test_the_optimizer_keeps_its_parameters_and_its_state_follows() -> None:
    recipe = examples.make("momentum")
    recipe.loss(recipe.model, recipe.batches[0][1]).sum().backward()
    recipe.optimizer.step()
    narrow = in_precision(recipe, torch.float32)
    assert {id(p) for g in narrow.optimizer.param_groups for p in g["params"]} == {
        id(p) for p in narrow.model.parameters()
    }
    held = [s["momentum_buffer"].dtype for s in narrow.optimizer.state.values()]
    assert set(held) == {torch.float32} == {p.dtype for p in narrow.model.parameters()}
    assert narrow.batches[1][1][0].dtype == narrow.queries["q"][0].dtype == torch.float32
    assert len(narrow.batches) == len(recipe.batches)


def test_none_changes_nothing() -> None:
    recipe = examples.make()
    assert in_precision(recipe, None) is recipe
