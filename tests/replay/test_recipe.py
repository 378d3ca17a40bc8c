"""A recipe by name: imported only when asked for, checked, and stepping as the recorded loop did."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import batch_of, cross_entropy, ids_of, mlp, same_weights, sgd, terms_of, train
from tests.support.oracles import assert_same
from torch import nn

import backstory
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe, hidden, load_recipe, place, take_step, weights


def recipe(lr: float = 0.1, **changes: Any) -> Recipe:
    model = mlp()
    optimizer = sgd(model, lr, momentum=0.9)
    known: dict[str, Any] = {
        "model": model, "optimizer": optimizer, "loss": cross_entropy, "clip_norm": 0.1,
        "batches": [(ids_of(t), batch_of(ids_of(t))) for t in range(4)],
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    }  # fmt: skip
    return Recipe(**{**known, **changes})


def nothing() -> int:
    return 3


HERE = "tests.replay.test_recipe"


def test_a_recipe_is_found_by_name_and_made_fresh() -> None:
    one, two = load_recipe(f"{HERE}:recipe", {"lr": 0.3}), load_recipe(f"{HERE}:recipe")
    assert one.optimizer.param_groups[0]["lr"] == 0.3
    assert two.optimizer.param_groups[0]["lr"] == 0.1
    assert one.model is not two.model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no.such.module:f",
            r"could not import the recipe 'no.such.module:f' \(No module named 'no'\). Run from a place",
        ),
        (f"{HERE}:absent", "could not import the recipe"),
        (f"{HERE}:nothing", "must return a backstory.Recipe, got int"),
        ("module", "package.module:function, got 'module'"),
        (":f", "package.module:function, got ':f'"),
        (".near:f", "package.module:function, got '.near:f'"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(name)


def test_where_a_package_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "loose").mkdir()
    (tmp_path / "single.py").write_text("raise RuntimeError")
    assert place("whole.part") == str(tmp_path / "whole")
    assert place("loose.part") == str(tmp_path / "loose")
    assert place("single") == str(tmp_path / "single.py")
    assert place("torch.nn") == str(Path(torch.__file__).parent)
    assert (place("time"), place("nowhere")) == ("Python itself", None)


def test_a_package_that_another_one_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(sys, "path", [*sys.path, str(first), f"{first}/", str(second)])
    for folder in (first, second):
        (folder / "spaced").mkdir(parents=True)
        (folder / "twice.py").write_text("")
    (first / "once.py").write_text("import twice.part")
    (second / "os.py").write_text("")
    assert hidden("once") == hidden("spaced") == hidden("nowhere") == hidden("json") == ""
    said = f"Python imports 'twice' from {first / 'twice.py'}, which shadows {second / 'twice.py'}. Rename yours."
    assert hidden("twice.part") == said
    assert f"which shadows {second / 'os.py'}" in hidden("os")
    with pytest.raises(UsageError, match=re.escape(said)):
        load_recipe("once:f")  # it is the module that was not found which is told


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_steps_are_those_of_the_recorded_loop(max_norm: float | None, tmp_path: Path) -> None:
    made, loop = recipe(clip_norm=max_norm), recipe(clip_norm=max_norm)
    train(tmp_path / "run", loop.model, loop.optimizer, 4, max_norm=max_norm, schedule=loop.schedule)
    for t in range(4):
        losses = take_step(made, t)
        assert losses.shape == (3,)
        assert not losses.requires_grad
    same_weights(made.model.state_dict(), loop.model.state_dict(), terms_of(made.model, 4))


def test_weights_can_be_replaced() -> None:
    plain, less = recipe(lr=1.0, clip_norm=None), recipe(lr=1.0, clip_norm=None)
    start = nn.utils.parameters_to_vector(plain.model.parameters()).detach()
    take_step(plain, 0)
    take_step(less, 0, weights(less, 0) / 2)
    moved, half = (nn.utils.parameters_to_vector(r.model.parameters()).detach() - start for r in (plain, less))
    assert_same(2 * half, moved, terms_of(plain.model, 1), size=float(start.abs().max()))


def test_weights_of_a_batch() -> None:
    n = len(recipe().batches[0][0])
    assert weights(recipe(), 0).tolist() == [1 / n] * n
    assert weights(recipe(loss_reduction="sum"), 0).tolist() == [1.0] * n
    counted = recipe(loss_reduction="token-mean", tokens=lambda batch: torch.arange(1, n + 1))
    assert weights(counted, 0).tolist() == [2 / (n * (n + 1))] * n
    listed = recipe(loss_reduction="token-mean", tokens=lambda batch: list(range(1, n + 1)))
    assert torch.equal(weights(listed, 0), weights(counted, 0))
    with pytest.raises(UsageError, match="needs tokens="):
        weights(recipe(loss_reduction="token-mean"), 0)
    given = recipe(loss_reduction="weights", weights=lambda step: torch.full((n,), step + 0.5))
    assert weights(given, 1).tolist() == [1.5] * n
    with pytest.raises(UsageError, match="needs weights="):
        weights(recipe(loss_reduction="weights"), 0)
    with pytest.raises(UsageError, match=f"got 1 for {n} samples"):
        weights(recipe(loss_reduction="weights", weights=lambda step: torch.ones(1)), 0)
    with pytest.raises(UsageError, match="must be one of 'mean', 'sum', 'token-mean', 'weights', got 'median'"):
        weights(recipe(loss_reduction="median"), 0)


def test_a_recipe_named_in_a_run_is_kept_but_not_imported(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 1, recipe="never.imported:make", recipe_args={"seed": 3})
    run = backstory.open(tmp_path / "run")
    assert (run.config["recipe"], run.config["recipe_args"]) == ("never.imported:make", {"seed": 3})
    assert "never" not in sys.modules
