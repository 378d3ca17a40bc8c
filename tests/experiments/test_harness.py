"""The skeleton of the studies on runs of seconds: truth, methods whose scores are known beforehand, and what is kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.data.images import mean_loss, recipe, setup_of
from experiments.fidelity.methods import KINDS, ImageProblem, Row, problem_of
from experiments.harness import (
    CEILING,
    Method,
    Problem,
    Scores,
    agreements,
    choose,
    costs,
    failures,
    minus,
    names_of_all,
    recorded,
    run_seeds,
    select,
    train,
)
from experiments.statistics import agreement
from tests.support.oracles import assert_same

from backstory.errors import NumericalError, UsageError
from backstory.exact.leave_out import leave_out
from backstory.replay.recipe import take_step

TINY = setup_of("tiny", "gelu", "sgd", 2, 48)
N = 8


def cheat(sign: float, calls: list[int] | None = None) -> Callable[[ImageProblem], Scores]:
    def scores(problem: ImageProblem) -> Scores:
        truth = leave_out(problem.make, [r for k in KINDS for r in problem.removals[k]], "test", dtype=torch.float64)
        return Scores(dict(zip(KINDS, (sign * truth.mean(1, keepdim=True)).split(N), strict=True)), cost={"bytes": 4.0})

    return scores


def overflows(problem: ImageProblem) -> Scores:
    raise NumericalError("overflow")


def test_a_perfect_predictor_scores_1_its_opposite_minus_1_and_a_failed_row_is_named() -> None:
    said: list[tuple[str, int, int]] = []
    rows = [Row("worst", cheat(-1.0)), Row("best", cheat(1.0)), Row("none", overflows)]
    seeds = run_seeds((problem_of(TINY, s, N) for s in (0, 1)), rows, say=lambda *x: said.append(x))
    assert names_of_all(seeds, rows) == ["worst", "best"]
    assert failures(seeds) == ["none: seed 0: overflow", "none: seed 1: overflow"]
    assert agreements(seeds, "worst", "single")["seeds"] == pytest.approx([-1.0, -1.0])
    best = agreements(seeds, "best", "all")
    assert best["mean"] == pytest.approx(1.0)
    assert best["interval"]["lower"] > 0.99, "however the removals are drawn, the order is right"
    assert minus(seeds, "best", "worst", "all") == pytest.approx({"mean": 2.0, "lower": 2.0, "upper": 2.0})
    assert agreements(seeds, CEILING, "single")["mean"] > 0.9
    assert costs(seeds, "best")["bytes"] == 4.0
    assert costs(seeds, "best")["seconds"] > 0
    assert said[-1] == ("seed 1: methods", 3, 3)
    assert {stage for stage, _, _ in said} >= {"seed 0: retrain", "seed 0: unroll", "seed 0: methods"}


def test_a_swept_setting_is_chosen_on_the_half_that_is_not_scored() -> None:
    """Setting "even" is right on the even removals and wrong on the odd ones: it must be chosen, and score badly."""
    truth = {"a": torch.arange(32.0, dtype=torch.float64).reshape(8, 4)}
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)[:, None]
    swept = Scores(truth, {"odd": {"a": -signs * truth["a"]}, "even": {"a": signs * truth["a"]}})
    row = choose(swept, truth, halves=True)
    assert row.chosen == {"a": "even"}
    assert row.counted.tolist() == [1, 3, 5, 7]
    assert agreement(row.values["a"][row.counted], truth["a"][row.counted]) == pytest.approx(-1.0)
    assert not choose(swept, truth, halves=False).chosen
    assert len(choose(replace(swept, settings={}), truth, halves=True).counted) == 8


def test_both_rows_of_a_difference_are_compared_on_the_removals_that_count_for_both() -> None:
    (seed,) = run_seeds([problem_of(TINY, 0, N)], [Row("best", cheat(1.0))], ceiling=False)
    swept = Scores(seed.truth, {"one": seed.truth})
    seed.rows["swept"] = choose(swept, seed.truth, halves=True)
    assert len(seed.pair("best", "swept", "all").truth) == N // 2
    assert len(seed.points("best", "all")[0]) == N


def test_truth_and_ceiling_are_read_from_the_cache(tmp_path: Path) -> None:
    first = problem_of(TINY, 0, 2)
    first.cache = tmp_path
    truth, exact = first.truth(), first.exact()
    assert len(list(tmp_path.rglob("*.json"))) >= 4
    again = problem_of(TINY, 0, 2)
    again.cache = tmp_path
    again.make = lambda: recipe(TINY, 0)
    for kind in KINDS:
        assert_same(again.truth()[kind], truth[kind], 1, dtype=torch.float64)
    assert_same(again.exact().scores, exact.scores, 1, dtype=torch.float64)


def test_scores_of_occurrences_are_summed_as_those_of_an_answer() -> None:
    problem = problem_of(TINY, 0, N)
    answer = problem.exact()
    assert problem.of_occurrences(answer.scores[0]).keys() == set(KINDS)
    for kind in KINDS:
        expected = problem.of(answer)[kind]
        assert_same(problem.of_occurrences(answer.scores[0])[kind], expected, 2, dtype=torch.float64)
        assert not torch.allclose(problem.of(answer, timeless=True)["single"], problem.of(answer)["single"])


def test_a_removal_lies_in_a_third_where_all_its_uses_do() -> None:
    """Two epochs of three steps: the last one lies in the second and third thirds; uses in both epochs mostly in two."""
    problem = problem_of(TINY, 0, 40)
    ids = [list(names) for names, _ in problem.make().batches]
    when, removed = problem.thirds()
    assert when.tolist() == [t // 2 for t in range(6) for _ in ids[t]]
    for kind, first in (("single", 3), ("all", 0)):
        for removal, third in zip(problem.removals[kind], removed[kind].tolist(), strict=True):
            parts = {t // 2 for t in range(first, 6) if removal.samples[0] in ids[t]}
            assert third == (max(parts) if len(parts) == 1 else -1)
    assert -1 in removed["all"]
    assert set(removed["single"].tolist()) == {1, 2}


def test_recordings_are_made_once_while_they_are_kept_and_then_deleted() -> None:
    problem: Problem = problem_of(TINY, 0, 2)
    problem.keep = 1
    with problem:
        first = problem.recording(rank=2, warmup_steps=1)
        assert problem.recording(warmup_steps=1, rank=2) is first
        assert problem.saved >= first.seconds > 0
        second = problem.recording(rank=3, warmup_steps=1)
        assert not first.run.path.exists()
        assert second.run.path.exists()
        assert problem.once("x", lambda: 1) == problem.once("x", lambda: 2) == 1
    assert not second.run.path.exists()


def test_rows_are_chosen_by_name_or_group_in_the_order_of_the_table() -> None:
    def row(name: str, **more: object) -> Method[Problem]:
        return Method(name, lambda p: Scores({}), **more)  # type: ignore[arg-type]

    rows = [row("a", group="g"), row("b", group="g"), row("c"), row("d", default=False), row("e", package="no_such"), row("f", obstacle="it is for x only")]  # fmt: skip
    assert [m.name for m in select(rows, None)[0]] == ["a", "b", "c"]
    assert select(rows, None)[1] == ["e: no_such is not installed", "f: it is for x only"]
    assert [m.name for m in select(rows, ["d", "g"])[0]] == ["a", "b", "d"]
    assert [m.name for m in select(rows, ["c", "b"])[0]] == ["b", "c"]
    with pytest.raises(UsageError, match=r"there is no method 'magic'\. Choose from g, c, d, e, f"):
        select(rows, ["magic"])


def test_checkpoints_stand_at_the_thirds_of_the_run() -> None:
    made = train(recipe(TINY, 0))
    assert len(made.thirds) == 3
    end = made.recipe.model.state_dict()
    assert all(torch.equal(made.thirds[-1][0][name], x) for name, x in end.items())
    assert not torch.equal(made.thirds[0][0]["1.weight"], made.thirds[1][0]["1.weight"])
    assert [rate for _, rate in made.thirds] == [TINY.rate] * 3


@pytest.mark.parametrize("curvature", ["empirical", "exact:10"])
def test_the_model_is_trained_as_without_recording(tmp_path: Path, curvature: str) -> None:
    plan, plain = recipe(TINY, 0), recipe(TINY, 0)
    run = recorded(plan, tmp_path / "run", curvature=curvature, rank=4, warmup_steps=2)
    for t in range(len(plain.batches)):
        take_step(plain, t)
    for p, q in zip(plan.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    answer = run.query(plan.model, mean_loss, plan.queries["test"])
    assert answer.scores.shape == (1, 96)
    assert run.config["settings"]["curvature"] == curvature
    assert not plan.model._forward_hooks
