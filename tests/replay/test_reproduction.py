"""Replays: bit for bit where nothing rounds differently, up to rounding elsewhere, and told from other recipes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_same
from tests.support.rounding import NoisyRounding
from torch import Tensor, nn

from backstory import Recipe, Run, record
from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import losses
from backstory.replay.recipe import take_step
from backstory.replay.reproduction import Gap, Reproduction, farthest, replay, reproduces, reproduction
from backstory.replay.tape import Removal


def recorded(path: Path, checkpoints: int = 2, make: Callable[..., Recipe] = examples.make, **args: Any) -> Run:
    """A run as a user records it."""
    recipe = make(**args)
    with record(
        recipe.model, recipe.optimizer, path, loss_reduction=recipe.loss_reduction, projection="full",
        recipe=examples.NAME if make is examples.make else None, recipe_args=args, steps=len(recipe.batches), checkpoints=checkpoints or None,
    ) as rec:  # fmt: skip
        for t, (ids, _) in enumerate(recipe.batches):
            with rec.step(ids):
                take_step(recipe, t)
    return Run(path)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_recorded_run_is_reproduced(tmp_path: Path, dropout: float) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", clip=0.3, dropout=dropout)
    args = run.config["recipe_args"]
    actual = reproduction(run, examples.NAME, args=args)
    assert reproduces(run, examples.NAME, args=args) is True
    assert max(actual.same + actual.near) == 8
    assert "reproduces the run" in str(actual)


@pytest.mark.parametrize("checkpoints", [0, 2])
def test_whole_numbers_are_reproduced_bit_for_bit(tmp_path: Path, checkpoints: int) -> None:
    actual = reproduction(recorded(tmp_path / "run", checkpoints, examples.whole), examples.whole)
    assert actual
    assert actual.same[-1] == 8
    assert "reproduces the run bit for bit" in str(actual)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_other_rounding_is_no_other_recipe(kind: str, tmp_path: Path) -> None:
    args: dict[str, Any] = {"optimizer": kind, "dropout": 0.4, "clip": 0.3}
    with NoisyRounding():
        run = recorded(tmp_path / "run", **args)
    actual = reproduction(run, examples.NAME, args=args)
    assert actual
    assert actual.near[-1] == 8
    assert "up to rounding" in str(actual)
    assert 0 < actual.gaps[8].replay <= actual.gaps[8].allowed < 1e-12


def test_without_stored_weights_a_mismatch_stays_open(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", checkpoints=0)
    (tmp_path / "run" / "checkpoint-00000008.safetensors").unlink()
    with NoisyRounding():
        actual = reproduction(run, examples.NAME)
    assert not actual
    assert (actual.undecided, actual.different) == ((8,), ())
    assert "not bit-identical to the run's" in str(actual)
    assert "A different processor" in str(actual)
    assert "checkpoints=K" in str(actual)


@pytest.mark.parametrize("other", [{}, {"dropout": 0.4, "schedule": True}, {"dropout": 0.4, "seed": 1}])
def test_another_recipe_is_told_apart(other: dict[str, Any], tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", dropout=0.4)
    args = {"optimizer": "momentum", **other}
    actual = reproduction(run, examples.NAME, args=args)
    assert not actual
    assert "differs from the run at step" in str(actual)
    assert not reproduces(run, examples.NAME, args=args)


def test_a_millionth_of_the_rate_is_told_apart(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")

    def faster() -> Any:
        recipe = examples.make()
        recipe.optimizer.param_groups[0]["lr"] *= 1 + 1e-6
        return recipe

    actual = reproduction(run, faster)
    assert actual.different
    assert actual.gaps[actual.different[0]].replay < 1e-5


@pytest.mark.parametrize("other", [0.0, 1.0, 2.0], ids=["no training", "itself", "twice the rate"])
def test_coarse_weights_cannot_tell_recipes_apart(other: float, tmp_path: Path) -> None:
    """Rounding of bfloat16 explains more than a little training does: only what is the same bit for bit is met."""

    def coarse(rate: float = 1.0) -> Recipe:
        made = examples.make()
        model = made.model.bfloat16()
        batches = [(ids, (x.bfloat16(), y)) for ids, (x, y) in made.batches]
        return dataclasses.replace(
            made, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01 * rate), batches=batches
        )

    actual = reproduction(recorded(tmp_path / "run", make=coarse), lambda: coarse(other))
    if other != 1.0:
        assert actual.undecided
        assert not actual
        assert "another recipe could look the same" in str(actual)


def test_each_tensor_has_its_own_bound() -> None:
    spread, sizes = {"a": 1e-9, "b": 2e-9, "c": 1e-3}, {"a": 10, "b": 10, "c": 5}

    def judged(**apart: float) -> Gap:
        return farthest({"a": 0.0, "b": 0.0, "c": 0.0, **apart}, spread, sizes, 1e-7)

    assert judged(a=1.9e-8).rounding, "as far as the tensor in the middle is allowed"
    assert not judged(a=2.1e-8).rounding
    assert judged(b=2.1e-8).tensor == "b"
    assert judged(c=1.0).rounding, "its rounding took half of the digits"
    assert not judged(b=float("inf")).rounding
    assert not judged(other=float("inf")).rounding
    assert not farthest({"a": 0.0, "c": 9e-3}, {"a": 1e-9, "c": 1e-3}, {"a": 4, "c": 5}, 1e-7).rounding, "most weights"


class Shifted(nn.Module):
    """All logits plus one number, whose gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.shift = nn.Linear(3, 5, dtype=examples.D), nn.Linear(1, 1, bias=False, dtype=examples.D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.logits(x) + self.shift(torch.ones_like(x[:, :1]))
        return out


def shifted() -> Recipe:
    recipe = examples.make()
    torch.manual_seed(0)
    model = Shifted()
    return dataclasses.replace(recipe, model=model, optimizer=torch.optim.Adam(model.parameters(), eps=1e-30))


def test_a_weight_that_only_rounding_moves_hides_no_fault_and_is_none(tmp_path: Path) -> None:
    with NoisyRounding():
        run = recorded(tmp_path / "run", make=shifted)
    actual = reproduction(run, shifted)
    there, here = (m.state_dict()["shift.weight"] for m in (run.load_weights(Shifted()), replay(shifted).model))
    assert float((there - here).abs()) > 1e-4, "rounding did not move it, and the test says nothing"
    assert actual, str(actual)
    assert not reproduction(run, lambda: dataclasses.replace(shifted(), clip_norm=1.0))


def test_a_shorter_recipe_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")

    def short() -> Any:
        recipe = examples.make()
        return dataclasses.replace(recipe, batches=recipe.batches[:3])

    with pytest.raises(UsageError, match="3 steps, but the run has 8"):
        reproduces(run, short)


@pytest.mark.parametrize("kind", examples.KINDS)
def test_replays_are_the_training(kind: str) -> None:
    recipe = examples.make(kind, clip=0.3, dropout=0.4)
    for t in range(len(recipe.batches)):
        take_step(recipe, t)
    for _ in range(2):
        actual = replay(examples.NAME, args={"optimizer": kind, "dropout": 0.4, "clip": 0.3})
        examples.assert_replayed(actual, recipe)


def test_a_replay_with_a_removal_is_tslooss_counterfactual() -> None:
    removal = Removal((3,))
    with_it, without = (losses(replay(examples.make, r), "q") for r in (None, removal))
    actual = leave_out(examples.make, [removal], "q")[0]
    assert_same(without - with_it, actual, examples.TERMS, size=1.0)


def test_nothing_to_compare_is_not_a_success() -> None:
    assert not Reproduction(())
    assert "nothing to compare" in str(Reproduction(()))
