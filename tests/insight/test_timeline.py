"""The timeline against influences, rates and losses that are put together by hand."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.insight.runs import STEPS, Small, loss, small
from tests.support.loops import batch_of, ids_of, mlp, sgd, train

import backstory
from backstory.insight.phases import Curve, Phases, phases
from backstory.insight.timeline import timeline


def test_a_step_is_the_mean_of_its_occurrences_over_its_rate(plain: Small) -> None:
    actual = timeline(plain.run, plain.model, loss, plain.queries)
    scores = plain.run.query(plain.model, loss, plain.queries).scores  # (4, 36)
    for t in range(STEPS):
        expected = float(scores[:, 3 * t : 3 * t + 3].mean())
        rate = 0.3 * (1 - t / (2 * STEPS))
        assert actual.influence[t] == pytest.approx(expected, rel=1e-9)
        assert actual.rate[t] == pytest.approx(rate)
        assert actual.per_rate[t] == pytest.approx(expected / rate, rel=1e-9)
    assert actual.at == STEPS


@pytest.mark.parametrize("name", ["momentum, decay, clipped", "adamw, preconditioned, clipped"])
def test_clipped_steps_add_up_to_nothing_and_are_left_out(name: str, tmp_path: Path) -> None:
    made = small(name, tmp_path / "run")
    actual = timeline(made.run, made.model, loss, made.queries)
    clipped = made.run.steps().clip < 1
    assert clipped.sum() > STEPS // 2
    assert np.isnan(actual.per_rate).tolist() == clipped.tolist()
    scores = made.run.query(made.model, loss, made.queries).scores.mean(0).reshape(STEPS, 3)
    assert actual.size.tolist() == pytest.approx(
        (scores.abs().mean(1) / torch.from_numpy(actual.rate)).tolist(), rel=1e-6
    )
    assert np.abs(actual.influence[clipped]).max() < 0.2 * (actual.size * actual.rate)[clipped].min(), (
        "they nearly add up to 0"
    )
    assert any(f"{clipped.sum()} of {STEPS} steps were clipped" in note for note in actual.caveats)


def test_losses_are_those_of_training(plain: Small) -> None:
    model = mlp()
    optimizer = sgd(model, 0.3)
    actual = timeline(plain.run, plain.model, loss, plain.queries).loss
    for t in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.3 * (1 - t / (2 * STEPS))
        value = loss(model, batch_of(ids_of(t))).mean()
        assert actual[t] == pytest.approx(value.item(), rel=1e-9)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def test_at_a_checkpoint_only_what_was_before_counts(plain: Small) -> None:
    model = plain.run.load_weights(mlp(), 4)
    actual = timeline(plain.run, model, loss, plain.queries, 4)
    assert len(actual.influence) == len(actual.loss) == 4
    expected = plain.run.query(model, loss, plain.queries, 4).scores.mean(0)
    assert actual.influence[3] == pytest.approx(float(expected[9:12].mean()), rel=1e-9)


def test_a_rate_of_zero_and_losses_that_are_not_known(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 3))
    train(tmp_path / "run", model, optimizer, 6, schedule=schedule)
    actual = timeline(backstory.open(tmp_path / "run"), model, loss, batch_of([1, 2]))
    assert np.isnan(actual.per_rate).tolist() == [True] + [False] * 5
    assert np.isnan(actual.loss).all()
    assert list(actual.drawings()) == ["timeline"], "no plot of losses that are not known"


def test_an_answer_in_plain_values(plain: Small) -> None:
    actual = timeline(plain.run, plain.model, loss, plain.queries)
    told = actual.as_dict()
    assert told["phases"]["shape"] == "too short"
    assert "per unit of learning rate" in told["unit"]
    assert any("the mean loss of 4 queries" in note for note in told["caveats"])
    assert len(actual.to_pandas()) == STEPS
    assert list(actual.drawings()) == ["timeline", "loss"]
    assert not any("clipped" in note for note in told["caveats"])


def test_phases_are_sought_in_the_sizes_and_know_how_many_samples_a_step_had(
    plain: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    sought: list[tuple[Curve, list[int]]] = []

    def seen(values: Curve, samples: Any, seed: int) -> Phases:
        sought.append((values, list(samples)))
        return phases(values)

    monkeypatch.setattr(sys.modules[timeline.__module__], "phases", seen)
    actual = timeline(plain.run, plain.model, loss, plain.queries)
    (values, samples) = sought[0]
    assert values is actual.size
    assert samples == STEPS * [3]
    assert any("phases are detected in mean" in note for note in actual.caveats)


def test_parameter_groups_count_by_their_largest_rate(tmp_path: Path) -> None:
    made = small("groups", tmp_path / "run")
    actual = timeline(made.run, made.model, loss, made.queries)
    assert actual.rate[0] == pytest.approx(0.2)
