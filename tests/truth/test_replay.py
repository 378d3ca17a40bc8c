"""Replays, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.truth import examples

from backstory import Run, record
from backstory.capture import fingerprint
from backstory.errors import UsageError
from backstory.session.recipe import take_step
from backstory.truth import Removal, replay, reproduces, reproduction, tsloo
from backstory.truth.asking import losses


def recorded(path: Path, steps: int | None = None, **args: Any) -> Run:
    """A run as a user records it."""
    recipe = examples.make(**args)
    count = len(recipe.batches) if steps is None else steps
    with record(
        recipe.model, recipe.optimizer, path, loss_reduction="mean", subspace="full", steps=count, checkpoints=2,
        recipe=examples.NAME, recipe_args=args,
    ) as rec:  # fmt: skip
        for t in range(count):
            with rec.step(recipe.batches[t][0]):
                take_step(recipe, t)
    return Run(path)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_recorded_run_is_reproduced_bit_for_bit(tmp_path: Path, dropout: float) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", clip=0.3, dropout=dropout)
    args = run.config["recipe_args"]
    found = reproduction(run, examples.NAME, args=args)
    assert reproduces(run, examples.NAME, args=args) is True
    assert found.same[-1] == 8
    assert "bit for bit" in str(found)


def test_another_recipe_is_told_apart(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", dropout=0.4)
    for args in ({"optimizer": "momentum"}, {"optimizer": "momentum", "dropout": 0.4, "schedule": True}):
        found = reproduction(run, examples.NAME, args=args)
        assert not found
        assert "differs from the run at step" in str(found)
        assert not reproduces(run, examples.NAME, args=args)


def test_a_shorter_recipe_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")

    def short() -> Any:
        import dataclasses

        recipe = examples.make()
        return dataclasses.replace(recipe, batches=recipe.batches[:3])

    with pytest.raises(UsageError, match="3 steps, the run 8"):
        reproduces(run, short)


@pytest.mark.parametrize("kind", examples.KINDS)
def test_replays_are_equal_to_the_last_bit(kind: str) -> None:
    words = {
        fingerprint(replay(examples.NAME, args={"optimizer": kind, "dropout": 0.4, "clip": 0.3}).model)
        for _ in range(2)
    }
    recipe = examples.make(kind, clip=0.3, dropout=0.4)
    for t in range(len(recipe.batches)):
        take_step(recipe, t)
    assert words == {fingerprint(recipe.model)}


def test_a_replay_with_a_removal_is_tslooss_counterfactual() -> None:
    removal = Removal((3,))
    with_it, without = (losses(replay(examples.make, r), "q") for r in (None, removal))
    assert torch.equal(without - with_it, tsloo(examples.make, [removal], "q")[0])


def test_nothing_to_compare_is_not_a_success() -> None:
    from backstory.truth import Reproduction

    assert not Reproduction((), ())
    assert "nothing to compare" in str(Reproduction((), ()))
