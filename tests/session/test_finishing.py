"""Steps finished behind the training: in order, one at a time, and nothing that goes wrong is lost."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.session.loops import FULL, batch_of, cross_entropy, ids_of, mlp, sgd
from torch import nn

import backstory
from backstory.errors import NumericalError, UsageError
from backstory.session.finishing import Behind
from backstory.store import RunStore, StepRecord


class Odd(Exception):
    """What a test raises in the thread."""


def test_a_step_is_finished_while_the_next_one_trains() -> None:
    kept: list[object] = []
    behind = Behind(kept.append)
    go = threading.Event()
    behind.give(0, lambda: go.wait(30) and "zero")  # type: ignore[arg-type, return-value]
    assert not kept, "give() returns before the step is finished"
    go.set()
    behind.give(1, lambda: "one")  # type: ignore[arg-type, return-value]
    assert kept[0] == "zero", "and waits for the one before"
    behind.wait()
    assert kept == ["zero", "one"]
    behind.give(2, lambda: threading.current_thread().name, now=True)  # type: ignore[arg-type, return-value]
    assert kept[2] == "MainThread"
    behind.close()


def test_a_failure_is_raised_by_the_next_call_and_once() -> None:
    def fail() -> StepRecord:
        raise Odd

    behind = Behind(lambda record: None)
    behind.give(4, fail)
    with pytest.raises(Odd):
        behind.wait()
    behind.wait()
    assert behind.step == 4
    behind.close()


def test_a_row_that_is_not_finite_is_named_in_its_own_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            optimizer.zero_grad()
            ids = ids_of(t)

            def take(t: int = t, ids: list[int] = ids) -> None:
                with rec.step(ids):
                    x, y = batch_of(ids)
                    x[1] = torch.nan if t == 2 else x[1]
                    cross_entropy(model, (x, y)).mean().backward()
                    optimizer.step()

            if t < 2:
                take()
                continue
            with pytest.raises(NumericalError, match=f"sample '{ids[1]}' in step 2"):
                take()
    assert RunStore.open(tmp_path / "run").n_steps() == 2


def test_a_buffer_that_is_used_again_is_refused_and_the_run_ends_before_it(tmp_path: Path) -> None:
    """With AdamW rows wait for the optimizer; a batch copied over the one before would change them silently."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = batch_of(ids_of(0))

    def loop(rec: backstory.Recorder) -> None:
        for t in range(4):
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, (x, y)).mean().backward()
                optimizer.step()
                if t == 1:
                    x.copy_(batch_of(ids_of(t + 1))[0])

    settings: dict[str, Any] = {"loss_reduction": "mean", "subspace": "random", "rank": 2, "encoding": "float64"}
    with (
        pytest.raises(UsageError, match=r"changed in place .* Give each batch tensors of its own"),
        backstory.record(model, optimizer, tmp_path / "run", **settings) as rec,
    ):
        loop(rec)
    assert RunStore.open(tmp_path / "run").n_steps() == 1


def test_after_a_failure_behind_the_training_the_run_says_where_it_ends(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"loss_reduction": "mean", "subspace": "random", "rank": 2}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        x, y = batch_of(ids_of(0))
        with rec.step(ids_of(0)):
            cross_entropy(model, (x, y)).mean().backward()
            optimizer.step()
            x.zero_()
        with pytest.raises(UsageError, match="changed in place"):
            rec.flush()
        with pytest.raises(UsageError, match="which ends at step 0"):
            rec.step(ids_of(1)).__enter__()


def test_a_checkpoint_waits_for_its_step(tmp_path: Path) -> None:
    """A step that turns out not to be recordable must leave no checkpoint behind."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"loss_reduction": "mean", "subspace": "random", "rank": 2, "steps": 2, "checkpoints": 1}

    def loop(rec: backstory.Recorder) -> None:
        x, y = batch_of(ids_of(0))
        with rec.step(ids_of(0)):
            cross_entropy(model, (x, y)).mean().backward()
            optimizer.step()
            x.zero_()

    with (
        pytest.raises(UsageError, match="changed in place"),
        backstory.record(model, optimizer, tmp_path / "run", **settings) as rec,
    ):
        loop(rec)
    store = RunStore.open(tmp_path / "run")
    assert store.n_steps() == 0
    assert [n for n in store.tensor_names() if n.startswith("checkpoint")] == ["checkpoint-00000000"]
