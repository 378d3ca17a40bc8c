"""Each row of the GPT study on a run of seconds: what it records, how it is asked, what it says of itself."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.gpt.methods import mean_margins, methods
from experiments.gpt.problem import Method, Problem, Scores, recorded, trained
from experiments.gpt.setups import domain_losses, recipe, removals
from tests.experiments.gpt.test_setups import TINY, without_network
from tests.support.oracles import assert_same

import backstory
from backstory.demo.gpt_model import counts
from backstory.replay.recipe import take_step
from experiments.gpt import methods as gpt_rows


@pytest.fixture(scope="module")
def problem() -> Iterator[Problem]:
    for _ in without_network():
        yield trained(TINY, 1, [str(r.samples[0]) for r in removals(TINY, 1, 8)])


def named(name: str) -> Method:
    return next(m for m in methods() if m.name == name)


def scores(name: str, problem: Problem) -> Scores:
    """Each row is computed once for all tests of this file."""
    if name not in problem.memo:
        method = named(name)
        with nullcontext() if method.recording is None else recorded(problem, method.recording) as made:
            problem.memo[name] = method.run(problem, made)
    found: Scores = problem.memo[name]
    return found


@pytest.mark.parametrize("name", [m.name for m in methods()])
def test_every_row_gives_a_number_for_each_removal_and_domain(name: str, problem: Problem) -> None:
    found = scores(name, problem)
    assert found.values.shape == (8, 4)
    assert found.values.isfinite().all()
    assert found.values.std(0).min() > 0
    assert found.about.keys() == {"projection", "curvature", "groups", "optimizer_model", "dims"}
    known = named(name).recording is not None
    assert (found.recording_ratio is not None) == (found.bytes_per_occurrence is not None) == known


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
    found = scores(name, problem).about
    assert tuple(found[k] for k in ("projection", "curvature", "groups", "optimizer_model")) == about


def test_the_default_row_equals_a_plain_recording(problem: Problem, tmp_path: Path) -> None:
    assert [m.name for m in methods() if m.default] == ["default"]
    plan = recipe(TINY, 1)
    with backstory.record(plan.model, plan.optimizer, tmp_path / "run", loss_reduction="token-mean") as rec:
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=counts(tokens)):
                take_step(plan, t)
    answer = backstory.open(tmp_path / "run").query(plan.model, domain_losses, plan.queries["domains"])
    expected = torch.stack([answer.sum_over([s]) for s in problem.samples])
    # Rows are rounded to float16; where the trainings' own rounding tips one over, it moves by one unit of float16.
    assert_same(scores("default", problem).values, expected, 1, dtype=torch.float16)


def test_rows_of_one_recording_stand_side_by_side() -> None:
    settings = [m.recording for m in methods() if m.recording is not None]
    changes = [a for a, b in pairwise(settings) if a != b]
    assert all(changes.count(x) == 1 for x in changes), "a recording is made twice"


def test_int8_takes_fewer_bytes_and_more_groups_take_more(problem: Problem) -> None:
    names = ("learned-16-empirical/6-int8", "learned-16-empirical/6", "learned-16-empirical/12")
    sizes = [scores(name, problem).bytes_per_occurrence or 0.0 for name in names]
    assert sizes == sorted(sizes)


def test_influence_is_computed_once_for_two_rows(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = scores("influence-swept", problem)
    monkeypatch.setattr(gpt_rows, "influence_sweep", None)
    again = named("influence-1e-3").run(problem, None)
    assert torch.equal(again.values, swept.settings["damping 0.001"])
    assert len({tuple(x.flatten().tolist()) for x in swept.settings.values()}) == len(swept.settings)


def test_a_margin_is_the_log_odds_of_the_next_token(problem: Problem) -> None:
    model, queries = problem.trained.model, problem.queries
    with torch.no_grad():
        found = mean_margins(model, queries[0])
        p = torch.softmax(model(queries[0][:, :-1]), -1).gather(2, queries[0][:, 1:, None])[..., 0]
        assert torch.allclose(found, (p / (1 - p)).log().mean(1), rtol=1e-3)
        assert torch.allclose(mean_margins(model, queries)[0], found.mean(), rtol=1e-4)
