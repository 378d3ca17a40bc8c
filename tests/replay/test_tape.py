"""The run as it was."""

import copy
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support import examples
from torch import Tensor

from backstory import Recipe
from backstory.errors import UsageError
from backstory.replay.tape import Removal, Tape, convert, in_precision, index, own_randomness, places, thin_out


def test_any_kept_state_leads_to_the_same_end() -> None:
    with own_randomness():
        tape = Tape(lambda: examples.make("adam", clip=0.3, schedule=True, dropout=0.3))
        tape.record([0, 3, 7])
        expected = copy.deepcopy(tape.recipe)
        for start in (7, 5, 0):
            for t in range(tape.rewind(start), tape.length):
                tape.step(t)
            examples.assert_replayed(tape.recipe, expected)


def test_steps_without_draws_share_one_generator_state() -> None:
    for dropout, count in ((0.0, 1), (0.3, 9)):
        with own_randomness():
            tape = Tape(lambda p=dropout: examples.make(dropout=p))  # type: ignore[misc]
            tape.record(())
        assert len({id(x) for x in tape.generators.values()}) == count
        assert len({id(x["numpy"]) for x in tape.generators.values()}) == 1, "of what was not drawn from"


def test_a_recipe_that_does_not_seed_is_the_same_at_each_call() -> None:
    def unseeded() -> Recipe:
        recipe = examples.make(dropout=0.3)
        torch.nn.init.normal_(recipe.model[0].weight)  # type: ignore[index]
        return recipe

    ends = []
    for _ in range(2):
        torch.rand(1)
        with own_randomness():
            tape = Tape(unseeded)
            tape.record(())
        ends.append(tape)
    assert ends[0].start == ends[1].start  # the same draws, not computed
    examples.assert_replayed(ends[0].recipe, ends[1].recipe)


def test_an_uncleared_gradient_in_the_norm_is_refused() -> None:
    def partly() -> Recipe:
        recipe = examples.make(clip=0.1)
        optimizer = torch.optim.SGD(list(recipe.model.parameters())[1:], lr=0.1)
        return dataclasses.replace(recipe, optimizer=optimizer)

    with pytest.raises(UsageError, match=r"0\.weight"):
        Tape(partly)


def test_at_beyond_the_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match="at must be between 1 and 8"):
        Tape(examples.make, length=9)


def test_thinned_steps_are_spread_and_begin_with_the_first() -> None:
    assert thin_out([5, 1, 1, 9], 5) == [1, 5, 9]
    assert thin_out(range(100), 4) == [0, 25, 50, 75]


IDS = [["a", "b"], ["c", "a"], ["b", "c"]]


@pytest.mark.parametrize(
    ("removal", "expected"),
    [
        (Removal(("a",)), {0: [0], 1: [1]}),
        (Removal(("b", "c")), {0: [1], 1: [0], 2: [0, 1]}),
        (Removal(("c",), steps=(2, 0)), {2: [1]}),
        (Removal(("a", "a")), {0: [0], 1: [1]}),
    ],
)
def test_places_are_those_of_the_removed_samples(removal: Removal, expected: dict[int, list[int]]) -> None:
    actual = places(removal, index(IDS))
    assert actual == expected
    assert list(actual) == sorted(actual)


def test_ids_out_of_tensors_and_arrays_are_the_numbers_they_are() -> None:
    batches: Any = [torch.tensor([4, 7]), np.array([9, 4])]
    names: list[Any] = [4, torch.tensor(4), np.int64(4)]
    for removal in (Removal((name,)) for name in names):
        assert places(removal, index(batches)) == {0: [0], 1: [1]}


def test_nothing_to_remove_is_an_error() -> None:
    for removal in (Removal(("d",)), Removal(("a",), steps=(2,))):
        with pytest.raises(UsageError, match="nothing to remove"):
            places(removal, index(IDS))


@pytest.mark.parametrize("share", [0.0, math.nan, math.inf])
def test_a_share_that_means_nothing_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        Removal(("a",), share=share)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_every_floating_tensor_of_a_batch_is_converted() -> None:
    x, y = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    actual = convert({"a": (x, y), "b": [x, "text", 3], "c": Pair(x, y)}, torch.float64)
    assert actual["a"][0].dtype == actual["b"][0].dtype == actual["c"].x.dtype == torch.float64
    assert actual["a"][1].dtype == actual["c"].y.dtype == torch.long
    assert actual["b"][1:] == ["text", 3]
    assert isinstance(actual["c"], Pair)


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
