"""The run as it was."""

import copy
import dataclasses

import pytest
import torch
from tests.support import examples

from backstory import Recipe
from backstory.errors import UsageError
from backstory.replay.tape import Tape, own_randomness, thinned


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
        assert len({id(x) for x in tape.generators}) == count


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
    with pytest.raises(UsageError, match="1 to 8"):
        Tape(examples.make, length=9)


def test_thinned_steps_are_spread_and_begin_with_the_first() -> None:
    assert thinned([5, 1, 1, 9], 5) == [1, 5, 9]
    assert thinned(range(100), 4) == [0, 25, 50, 75]
