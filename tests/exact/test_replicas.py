"""Stacked replays: how many, and for which models. Their numbers are checked in test_tsloo.py."""

from dataclasses import replace

import pytest
import torch
from tests.support import examples
from torch import nn

from backstory import Recipe
from backstory.exact import replicas
from backstory.replay import update
from backstory.replay.tape import Tape


def recorded(recipe: Recipe) -> Tape:
    tape = Tape(lambda: recipe)
    tape.record([0])
    tape.rewind(0)
    return tape


def with_model(model: nn.Module) -> Recipe:
    return replace(examples.make(), model=model.double(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_batch_norm_is_not_stacked() -> None:
    tape = recorded(with_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))))
    assert "torch.func" in (replicas.obstacle(tape, ({0: [1]}, 1.0), 0) or "")


def test_layer_norm_and_tied_weights_are_stacked() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    assert replicas.obstacle(recorded(with_model(model)), ({0: [1]}, 1.0), 0) is None


def test_a_wrong_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = recorded(examples.make("momentum"))
    right = update.advance_

    def wrong(now, grads, steps, max_norm, lead=0):  # type: ignore[no-untyped-def]
        right(now, grads, [c._replace(mu=0.5) for c in steps], max_norm, lead)

    monkeypatch.setattr(update, "advance_", wrong)
    assert "differ" in (replicas.obstacle(tape, ({0: [1]}, 1.0), 0) or "")


def test_bounds_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = recorded(examples.make())
    assert replicas.at_once(tape) == replicas.MOST
    size = sum(p.numel() for p in tape.parameters) * 8
    monkeypatch.setattr(replicas, "STACK_BYTES", 5 * size)
    assert replicas.at_once(tape) == 5
    monkeypatch.setattr(replicas, "SAVED_BYTES", 1)
    assert replicas.at_once(tape) == 1
