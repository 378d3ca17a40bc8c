"""A recording whose steps begin and end in different places."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.loops import FULL, batch_of, cross_entropy, ids_of, mlp, same_numbers, sgd, stored, terms_of, train

import backstory
from backstory.errors import UsageError
from backstory.integrations.recording import Recording
from backstory.store import RunStore


def opened(path: Path, model: Any, optimizer: Any, start: int = 0) -> Recording:
    run = Recording(path, "mean", None, FULL)
    run.open(model, optimizer, start=start, steps=None, scaler=None)
    return run


def one(run: Recording, model: Any, optimizer: Any, t: int, late: bool = False) -> None:
    ids = ids_of(t)
    optimizer.zero_grad()
    run.begin()
    run.batch(ids, 0.5 if late else 1 / len(ids))
    cross_entropy(model, batch_of(ids)).mean().backward()
    if late:
        run.weigh(0, 1 / len(ids))
    optimizer.step()
    run.end()


@pytest.mark.parametrize("late", [False, True])
def test_steps_equal_those_of_a_with_statement(late: bool, tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    run = opened(tmp_path / "run", model, optimizer)
    for t in range(4):
        assert run.at == t
        one(run, model, optimizer, t, late)
    run.close()
    twin = mlp()
    train(tmp_path / "plain", twin, sgd(twin), 4)
    same_numbers(stored(tmp_path / "run"), stored(tmp_path / "plain"), terms_of(twin, 4))


def test_a_step_that_was_begun_can_be_abandoned(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    run = opened(tmp_path / "run", model, optimizer)
    one(run, model, optimizer, 0)
    run.begin()
    run.batch(ids_of(1))
    run.abandon()
    assert run.scope is None
    one(run, model, optimizer, 1)
    run.begin()
    run.close()
    run.close()
    assert backstory.open(tmp_path / "run").n_steps == 2
    assert RunStore.open(tmp_path / "run").config["closed"]


def test_opening_again_lets_go_of_what_failed(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    run = opened(tmp_path / "run", model, optimizer)
    one(run, model, optimizer, 0)
    run.begin()
    run.open(model, optimizer, start=1, steps=None, scaler=None)
    one(run, model, optimizer, 1)
    assert run.at == 2
    run.close(failed=True)
    assert not RunStore.open(tmp_path / "run").config["closed"]


def test_defaults_follow_the_loss_that_was_named() -> None:
    assert Recording("x", "token-mean", None, {})._arguments["settings"].curvature == "empirical/6"
    assert Recording("x", "mean", None, {})._arguments["settings"].curvature == "auto", "the first step decides"
    assert Recording("x", "mean", None, {"preset": "fast"})._arguments["settings"].rank == 16
    assert (
        Recording("x", "token-mean", None, {"curvature": "empirical"})._arguments["settings"].curvature == "empirical"
    )
    with pytest.raises(UsageError, match="loss_reduction must be one of 'mean', 'sum', 'token-mean', got 'weights'"):
        Recording("x", "weights", None, {})
    with pytest.raises(UsageError, match="resume= is set by the trainer"):
        Recording("x", "mean", None, {"resume": True})
