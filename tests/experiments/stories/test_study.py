"""Fine-tuning a small Llama: one timeline for each number of passes, of the run that it leaves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.stories.study import RECIPE, FineTuning, StoriesSetup, fine_tune, heading, mean_loss, recipe
from tests.experiments.stories.test_recipe import TINY, without_network

import backstory
from backstory.replay.recipe import take_step
from backstory.run import gradients as coordinates


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> list[FineTuning]:
    return fine_tune(tmp_path_factory.mktemp("stories"), StoriesSetup(**TINY))


def test_once_and_three_times_with_as_many_steps(actual: list[FineTuning]) -> None:
    assert [(one.setup.passes, one.setup.sequences, one.timeline.at) for one in actual] == [(1, 24, 12), (3, 8, 12)]
    assert [Path(one.run).name for one in actual] == ["run-1", "run-3"]
    for one in actual:
        run = backstory.open(one.run)
        assert (run.config["recipe"], run.config["recipe_args"]["passes"]) == (RECIPE, one.setup.passes)
        assert run.config["settings"]["rank"] == 8
    assert heading(actual[0]) == "24 sequences of 'poems', each used once."
    assert heading(actual[1]) == "8 sequences of 'poems', each used 3 times."


def test_the_timeline_is_of_unseen_sequences_on_the_final_model(
    actual: list[FineTuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinates, "check_model", lambda *_: [])  # trained anew: the run's up to rounding only
    for one in actual:
        plan = recipe(**TINY, passes=one.setup.passes)
        before = mean_loss(plan.model, plan.queries["unseen"]).item()
        for t in range(12):
            take_step(plan, t)
        after = mean_loss(plan.model, plan.queries["unseen"]).item()
        assert (one.before, one.after) == pytest.approx((before, after), rel=1e-4)
        answer = backstory.open(one.run).query(plan.model, mean_loss, plan.queries["unseen"])
        expected = [float(answer.scores[0, answer.steps == t].mean()) for t in range(12)]
        assert one.timeline.influence.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-9)
        assert max(map(abs, expected)) > 1e-6


def test_plain_values_hold_both_kinds_of_phases(actual: list[FineTuning]) -> None:
    plain = actual[0].as_dict()
    assert plain["setup"]["sequences"] == 24
    assert plain["timeline"]["phases"]["shape"] == "too short" == plain["phases_of_signed_means"]["shape"]
    assert plain["phases_of_undivided_sizes"]["steps"] == 12
    assert len(plain["timeline"]["loss"]) == 12
