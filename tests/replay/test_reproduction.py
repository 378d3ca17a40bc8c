"""Replays: bit for bit where nothing rounds differently, up to rounding elsewhere, and told from other recipes."""

import copy
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
from backstory.recording import record_checkpoints
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


def test_without_stored_weights_the_steps_tell(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", checkpoints=0)
    (tmp_path / "run" / "checkpoint-00000008.safetensors").unlink()
    with NoisyRounding():
        actual = reproduction(run, examples.NAME)
    assert actual
    assert (actual.steps, actual.near) == (8, ())
    assert "up to rounding (compared at 8 steps" in str(actual)


def test_without_steps_of_training_and_stored_weights_a_mismatch_stays_open(tmp_path: Path) -> None:
    """A run from checkpoints has gradients at other weights than training's."""
    made, kept = examples.make(), list[Any]()
    for t in range(9):
        kept.append((t, copy.deepcopy(made.model.state_dict()), None))
        if t < 8:
            take_step(made, t)
    run = record_checkpoints(examples.make(), kept[::4], tmp_path / "run", projection="full")
    (tmp_path / "run" / "checkpoint-00000008.safetensors").unlink()
    with NoisyRounding():
        actual = reproduction(run, examples.NAME)
    assert not actual
    assert (actual.steps, actual.left, actual.undecided[-1]) == (0, (), 8)
    assert "not bit-identical to the run's" in str(actual)
    assert "A different processor" in str(actual)
    assert "checkpoints=K" in str(actual)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "no dropout": ({"dropout": 0.0}, "at step 0: the gradient norm has a relative error"),
    "data": ({"seed": 1}, "at step 0: the recipe has sample"),
    "clipping": ({"clip": 0.2}, "at step 0: the clipping factor has a relative error"),
    "sum": ({"reduction": "sum"}, "at step 0: the gradient norm has a relative error of 3.0e+00"),
    "activation": ({"activation": "relu"}, "at step 0: the gradient norm has a relative error"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_recipe_is_told_apart(other: str, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", dropout=0.4)
    changed, sentence = OTHERS[other]
    args = {"optimizer": "momentum", "dropout": 0.4, **changed}
    actual = reproduction(run, examples.NAME, args=args)
    assert not actual
    assert sentence in str(actual)
    assert "rounding explains" in str(actual) or other == "data"
    assert not reproduces(run, examples.NAME, args=args)


def test_rates_and_seeds_are_those_of_the_recording(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", dropout=0.4, schedule=True)

    def faster() -> Recipe:
        recipe = examples.make("momentum", dropout=0.4)
        recipe.optimizer.param_groups[0]["lr"] *= 2
        torch.manual_seed(77)
        return recipe

    assert reproduction(run, faster)


def test_a_millionth_of_the_loss_is_told_apart_at_the_first_step(tmp_path: Path) -> None:
    def more() -> Recipe:
        return dataclasses.replace(examples.make(), loss=lambda m, b: examples.loss(m, b) * (1 + 1e-6))

    actual = reproduction(recorded(tmp_path / "run"), more)
    assert [x.step for x in actual.left] == [0]
    assert "the gradient norm has a relative error of 1.0e-06" in str(actual)


@pytest.mark.parametrize("other", [0.0, 1.0, 2.0], ids=["less", "itself", "more"])
def test_coarse_weights_cannot_tell_recipes_apart(other: float, tmp_path: Path) -> None:
    """Rounding of bfloat16 explains more than a little training does: only what is the same bit for bit is met."""

    def coarse(share: float = 1.0) -> Recipe:
        made = examples.make()
        model = made.model.bfloat16()
        batches = [(ids, (x.bfloat16(), y)) for ids, (x, y) in made.batches]
        return dataclasses.replace(
            made,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            batches=batches,
            loss=lambda m, b: examples.loss(m, b) * (1 + 0.02 * (share - 1)),
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
