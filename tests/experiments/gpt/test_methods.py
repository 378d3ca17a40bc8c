"""Each row of the GPT study on a run of seconds: what it records, how it is queried, what it says of itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.gpt.methods import WHICH, Row, mean_margins, methods, problem_of, recording
from experiments.gpt.setups import domain_losses, recipe
from experiments.harness import Problem, Scores
from tests.experiments.gpt.test_setups import TINY, assert_trained_alike, without_network
from tests.support.oracles import assert_same

import backstory
from backstory.demo.gpt_model import counts
from backstory.replay.recipe import take_step
from experiments import baselines

MEMO: dict[str, Scores] = {}  # each row is computed once for all tests of this file


@pytest.fixture(scope="module")
def problem() -> Iterator[Problem]:
    for _ in without_network():
        with problem_of(TINY, 1, 8) as made:
            yield made
    MEMO.clear()


def named(name: str) -> Row:
    return next(m for m in methods() if m.name == name)


def scores(name: str, problem: Problem) -> Scores:
    if name not in MEMO:
        MEMO[name] = named(name).scores(problem)
    return MEMO[name]


@pytest.mark.parametrize("name", [m.name for m in methods()])
def test_every_row_gives_a_number_for_each_removal_and_domain(name: str, problem: Problem) -> None:
    actual = scores(name, problem)
    values = actual.values[WHICH]
    assert values.shape == (8, 4)
    assert values.isfinite().all()
    assert values.std(0).min() > 0
    assert actual.about.keys() == {"projection", "curvature", "groups", "optimizer_model", "dims"}
    assert (
        ("recording_ratio" in actual.cost)
        == ("bytes_per_occurrence" in actual.cost)
        == named(name).about.get("recorded", False)
    )


@pytest.mark.parametrize(
    ("name", "about"),
    [
        ("paper", ("full", "empirical", 1, "sgd proxy, literal")),
        ("full-empirical/6", ("full", "empirical", 6, "adamw, implicit")),
        ("full-empirical", ("full", "empirical", 1, "adamw, implicit where a step expands")),
        ("full-empirical/6-expanding", ("full", "empirical", 6, "adamw, implicit where a step expands")),
        ("full-empirical-implicit", ("full", "empirical", 1, "adamw, implicit")),
        ("learned-16-sampled-1/6", ("learned 16×16, 20 steps", "sampled:1", 6, "adamw, factored, implicit")),
        ("learned-16-empirical/6-per-layer", ("learned 16×16, per layer, 20 steps", "empirical", 6, "adamw, factored, implicit")),
        ("learned-16-empirical/6-int8", ("learned 16×16, int8, 20 steps", "empirical", 6, "adamw, factored, implicit")),
        ("random-16-empirical/6", ("random 16×16", "empirical", 6, "adamw, factored, implicit")),
        ("tracin", ("full", "none", 1, "sgd proxy")),
    ],
)  # fmt: skip
def test_a_row_says_what_it_is(name: str, about: tuple[Any, ...], problem: Problem) -> None:
    actual = scores(name, problem).about
    assert tuple(actual[k] for k in ("projection", "curvature", "groups", "optimizer_model")) == about


def test_the_default_row_equals_a_plain_recording(problem: Problem, tmp_path: Path) -> None:
    assert [m.name for m in methods() if m.about.get("default")] == ["default"]
    plan = recipe(TINY, 1)
    with backstory.record(plan.model, plan.optimizer, tmp_path / "run", loss_reduction="token-mean") as rec:
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=counts(tokens)):
                take_step(plan, t)
    answer = backstory.open(tmp_path / "run").query(plan.model, domain_losses, plan.queries["domains"])
    expected = problem.of(answer)[WHICH]
    # Rows are rounded to float16; where the trainings' own rounding tips one over, it moves by one unit of float16.
    assert_same(scores("default", problem).values[WHICH], expected, 1, dtype=torch.float16)


def test_rows_of_one_recording_stand_side_by_side(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recording is kept at a time: a row that comes back to an earlier one would record again."""
    made: list[str] = []

    def note(**settings: Any) -> None:
        if not made or made[-1] != repr(settings):
            made.append(repr(settings))
        raise LookupError

    monkeypatch.setattr(problem, "recording", note)
    for method in methods():
        if method.about.get("recorded"):
            with pytest.raises(LookupError):
                method.scores(problem)
    assert len(made) == len(set(made)) > 10, "a recording is made twice"


@pytest.mark.parametrize("settings", [{}, {"projection": "random", "rank": 4, "curvature": "sampled:2/3"}])
def test_recording_changes_nothing(settings: dict[str, object], problem: Problem) -> None:
    made = recording(problem, settings)
    assert made.run.n_steps == TINY.steps
    assert made.run.config["settings"]["seed"] == (1 if settings else 0)
    assert_trained_alike(replace(problem.trained, model=made.model), problem.trained)
    assert torch.equal(problem.queries, recipe(TINY, 1).queries["domains"])


def test_int8_takes_fewer_bytes_and_more_groups_take_more(problem: Problem) -> None:
    names = ("learned-16-empirical/6-int8", "learned-16-empirical/6", "learned-16-empirical/12")
    sizes = [scores(name, problem).cost["bytes_per_occurrence"] for name in names]
    assert sizes == sorted(sizes)


def test_influence_is_computed_once_for_two_rows(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = scores("influence-swept", problem)
    monkeypatch.setattr(baselines, "influence_sweep", None)
    again = named("influence-1e-3").scores(problem)
    assert torch.equal(again.values[WHICH], swept.settings["damping 0.001"][WHICH])
    assert len({tuple(x[WHICH].flatten().tolist()) for x in swept.settings.values()}) == len(swept.settings)


def test_a_margin_is_the_log_odds_of_the_next_token(problem: Problem) -> None:
    model, queries = problem.trained.model, problem.queries
    with torch.no_grad():
        actual = mean_margins(model, queries[0])
        p = torch.softmax(model(queries[0][:, :-1]), -1).gather(2, queries[0][:, 1:, None])[..., 0]
        assert torch.allclose(actual, (p / (1 - p)).log().mean(1), rtol=1e-3)
        assert torch.allclose(mean_margins(model, queries)[0], actual.mean(), rtol=1e-4)
