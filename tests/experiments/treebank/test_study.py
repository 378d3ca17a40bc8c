"""The treebank study on made-up text: its curves are those of the run that it leaves, at the checkpoints that it says."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from experiments.treebank.run import RECIPE, TreebankSetup, drawn, per_word, recipe
from experiments.treebank.study import TreebankResult, study
from tests.experiments.treebank.test_run import TINY, without_network

import backstory

SETUP = TreebankSetup(**TINY)


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> TreebankResult:
    return study(SETUP, tmp_path_factory.mktemp("treebank"), count=5, checked=2)


def test_a_run_is_left_with_a_checkpoint_at_each_epoch_s_end_and_between(actual: TreebankResult) -> None:
    run = backstory.open(actual.run)
    assert set(SETUP.ends) < set(run.checkpoints)
    assert len(run.checkpoints) == 13
    assert (run.config["recipe"], run.config["recipe_args"]["sequences"]) == (RECIPE, 24)
    assert run.config["settings"]["curvature"] == "empirical/6"
    assert run.config["settings"]["rank"] == 32
    assert run.config["settings"]["curvature_of"] == "windows"
    first = drawn(SETUP)
    assert run.content([first.ids[3]])[first.ids[3]]["text"] == first.texts[3]


def test_the_timeline_is_of_the_mean_loss_of_unseen_words_on_the_final_model(actual: TreebankResult) -> None:
    run, plan = backstory.open(actual.run), recipe(**TINY)
    model = run.load_weights(plan.model)
    answer = run.query(model, lambda m, x: per_word(m, x).mean(), plan.queries["valid"])
    rates = run.steps().groups["rate"][:, 0]
    sizes = [float(answer.scores[0, answer.steps == t].abs().mean()) / rates[t] for t in range(18)]
    assert actual.timeline.size.tolist() == pytest.approx(sizes, rel=1e-3)
    assert actual.timeline.at == 18
    assert bool(np.isfinite(actual.timeline.loss).all())
    assert actual.timeline.phases.shape == "too short" == actual.signed.shape == actual.undivided.shape


def test_groups_are_the_epochs_and_have_no_influence_before_they_begin(actual: TreebankResult) -> None:
    assert actual.evolution.groups == ("early", "middle", "late")
    begins = {name: math.inf for name in actual.evolution.groups}
    for name, row in zip(actual.evolution.groups, actual.evolution.mean, strict=True):
        begins[name] = min(c for c, x in zip(actual.evolution.checkpoints, row, strict=True) if np.isfinite(x))
    assert [begins[name] > end for name, end in zip(("middle", "late"), SETUP.ends, strict=False)] == [True, True]
    assert actual.evolution.samples[:, -1].tolist() == [24, 24, 24]


def test_sizes_of_a_third_are_means_over_its_occurrences_on_the_model_of_each_checkpoint(
    actual: TreebankResult,
) -> None:
    run, plan = backstory.open(actual.run), recipe(**TINY)
    assert actual.faded.shape == actual.evolution.mean.shape == (3, 12)
    assert np.isfinite(actual.faded).tolist() == np.isfinite(actual.evolution.mean).tolist()
    for column, at in enumerate(actual.evolution.checkpoints):
        model = run.load_weights(plan.model, at)
        answer = run.query(model, lambda m, x: per_word(m, x).mean(), plan.queries["valid"], at)
        for k, (lo, hi) in enumerate([(0, 6), (6, 12), (12, 18)]):
            own = answer.scores[0, (answer.steps >= lo) & (answer.steps < hi)].abs()
            if len(own):
                assert actual.faded[k, column] == pytest.approx(float(own.mean()), rel=1e-3)


def test_losses_are_those_of_the_model_at_each_epoch_s_end(actual: TreebankResult) -> None:
    run, plan, names = backstory.open(actual.run), recipe(**TINY), drawn(SETUP)
    own = [names.ids.index(x) for x in map(str, actual.ranks[0].result.ids)]
    for told, at in zip(actual.losses, SETUP.ends, strict=True):
        run.load_weights(plan.model, at)
        with torch.no_grad():
            expected = [per_word(plan.model, x).mean().item() for x in (names.tokens[own], plan.queries["valid"])]
        assert [told["copies"], told["unseen"]] == pytest.approx(expected, rel=1e-5)


def test_plain_values_hold_everything(actual: TreebankResult) -> None:
    plain = actual.as_dict()
    assert plain["setup"]["ends"] == SETUP.ends
    assert len(plain["copies"]) == 9
    assert len(plain["examples"]) == 3
    assert set(plain["seconds"]) == {"train and record", "timeline", "evolution", "rank copies", "retrain"}
    assert [one["copy"] for one in plain["proofs"] if one["own"]] == [one["id"] for one in plain["examples"][:2]]
    assert plain["proven"]["originals"] == 2
    assert "about 0.3" in plain["caution"]
