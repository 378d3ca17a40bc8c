"""Insights of a run with stored exact results: the numbers of `run.exact`, by hand, and what is said of them."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples
from tests.support.oracles import assert_same
from torch import nn

from backstory import insight
from backstory.errors import UsageError
from backstory.replay.queries import part
from backstory.results.origin import BY_REPLAY, EXACT, IN_PART
from backstory.run.run import Run

BATCH = examples.make().queries["q"]
OTHER = part(BATCH, 1, 3)
ROUNDING = 3 * examples.TERMS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The mean of a set is exact at the end and at one of two checkpoints."""
    made = recorded(tmp_path_factory.mktemp("exact") / "run", optimizer="momentum")
    made.describe(range(examples.N), source=["even" if i % 2 == 0 else "odd" for i in range(examples.N)])
    made.add_queries("q", BATCH)
    made.exact("q", examples.NAME)
    made.exact("q", examples.NAME, at=made.checkpoints[2])
    return made


@pytest.fixture(scope="module")
def model(run: Run) -> nn.Module:
    return run.load_weights(examples.make().model)


def assert_close(actual: Any, expected: Any) -> None:
    assert_same(torch.as_tensor(np.asarray(actual)), torch.as_tensor(np.asarray(expected)), ROUNDING, size=1.0)


def test_a_timeline_is_that_of_the_exact_scores(run: Run, model: nn.Module) -> None:
    exact, actual = run.exact("q", examples.NAME), insight.timeline(run, model, examples.loss, BATCH)
    scores, rate = exact.scores[0].numpy(), run.steps().groups["rate"].max(1)
    by_hand = [scores[exact.steps == t].mean() for t in range(8)]
    assert_close(actual.influence, by_hand)
    assert_close(actual.size, [np.abs(scores[exact.steps == t]).mean() / rate[t] for t in range(8)])
    assert (actual.method, actual.origin, actual.recording, actual.to_exact) == (EXACT, BY_REPLAY, None, None)
    assert actual.quality == run.quality(mean=True, exact=True)
    assert "influence on the mean loss of 3 queries" in actual.caveats
    recorded = insight.timeline(run, model, examples.loss, BATCH, method="adjoint")
    assert (recorded.method, recorded.origin) == ("adjoint", "From the recording, by reverse sweep.")
    assert recorded.quality == run.quality(mean=True)
    assert np.abs(recorded.influence - actual.influence).max() > 1e-6


def test_harmful_samples_are_those_of_the_exact_scores(run: Run, model: nn.Module) -> None:
    ids, sums = run.exact("q", examples.NAME).per_sample()
    actual = insight.harmful(run, model, examples.loss, BATCH, top=99)
    ranked = {x.sample: x.influence for x in (*actual.helpful, *actual.harmful[::-1])}
    order = np.argsort(-sums[0].numpy())
    assert list(ranked) == [ids[i] for i in order]
    assert_close(list(ranked.values()), sums[0].numpy()[order])
    assert actual.as_dict()["method"] == EXACT


def test_an_evolution_says_which_checkpoints_are_exact(run: Run, model: nn.Module) -> None:
    actual = insight.evolution(run, model, examples.loss, BATCH, by="source")
    first, second, last = actual.checkpoints
    assert actual.method == ("adjoint", EXACT, EXACT)
    assert actual.origin == IN_PART
    assert actual.quality == run.quality(first, mean=True), "of the recorded one"
    assert f"Checkpoints: step {second}, step {last} exact; step {first} from the recording" in actual.caveats[0]
    assert f"--at {first}`" in (actual.to_exact or "")
    for k, at in ((1, second), (2, last)):
        exact = run.exact("q", examples.NAME, at=at)
        ids, sums = exact.per_sample()
        by_hand = [sums[0][[i for i, x in enumerate(ids) if int(x) % 2 == odd]].mean().item() for odd in (0, 1)]
        assert_close(actual.mean[:, k], by_hand)
    with pytest.raises(UsageError, match=f"for step {first}"):
        insight.evolution(run, model, examples.loss, BATCH, by="source", method="exact")


def test_sources_use_the_mean_where_only_that_is_exact(run: Run, model: nn.Module) -> None:
    sets = {"all": BATCH, "other": OTHER}
    actual = insight.sources(run, model, examples.loss, sets)
    assert actual.method == (EXACT, "adjoint")
    assert "Query sets: all exact; other from the recording" in actual.caveats[0]
    assert any("all: exact for the mean of its queries" in text for text in actual.caveats)
    assert "--queries NAME --each" in (actual.to_exact or ""), "the other set has no name"
    ids, sums = run.exact("q", examples.NAME).per_sample()
    by_hand = {name: sums[0][[i for i, x in enumerate(ids) if int(x) % 2 == odd]].sum().item() for odd, name in ((0, "even"), (1, "odd"))}  # fmt: skip
    cells = {row[0].source: row[0].value for row in actual.cells}
    assert_close([cells[x] for x in by_hand], list(by_hand.values()))
    with pytest.raises(UsageError, match="no exact result"):
        insight.sources(run, model, examples.loss, sets, method="exact")
    assert insight.sources(run, model, examples.loss, {"all": BATCH}, method="exact").origin == BY_REPLAY
    assert insight.sources(run, model, examples.loss, {"all": BATCH}, method="adjoint").method == ("adjoint",)


def test_overwriting_has_the_exact_influence_beside_the_recordings_terms(run: Run, model: nn.Module) -> None:
    actual = insight.overwriting(run, model, examples.loss, BATCH, 3)
    exact = run.exact("q", examples.NAME)
    assert_close(actual.exact, exact.sum_over([3])[0].item())
    assert actual.method == "adjoint"
    assert "The terms are the recording's" in actual.words[0]
    assert actual.to_exact is None
    step = actual.steps[0]
    one = insight.overwriting(run, model, examples.loss, BATCH, 3, step=step)
    assert_close(one.exact, exact.occurrences(3).influence[0])
    without = insight.overwriting(run, model, examples.loss, OTHER, 3)
    assert (without.exact, without.words) == (None, ())
    assert f"backstory exact {run.path} --queries NAME" in (without.to_exact or "")


def test_own_ranks_and_single_uses_say_what_they_are(run: Run, model: nn.Module) -> None:
    batch = examples.make().batches[7]
    recorded = insight.memorisation(run, model, examples.loss, batch[1], batch[0])
    assert recorded.method == "adjoint"
    uses = run.query(model, lambda m, b: examples.loss(m, b).mean(), BATCH).occurrences(3)
    assert (uses.method, uses.origin) == (EXACT, BY_REPLAY)
