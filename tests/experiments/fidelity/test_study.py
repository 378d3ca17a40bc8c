"""The whole study on a run of seconds: keys, determinism, and scores that are known beforehand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.data.images import recipe, removals, setup_of
from experiments.fidelity.problem import Method, Problem, Scores
from experiments.fidelity.study import one_seed, select, study
from tests.support.plain import assert_alike

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from experiments.fidelity import study as fidelity

TINY = setup_of("tiny", "gelu", "sgd")
FEW = ["paper", "learned-16-sampled-1", "no-propagation", "influence-swept"]


def without_seconds(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "rows": [{k: v for k, v in row.items() if k != "seconds"} for row in found["rows"]]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(TINY, [0, 1], count=6, cache=tmp_path_factory.mktemp("cache")).as_dict()


def test_every_row_has_its_keys(whole: dict[str, Any]) -> None:
    keys = {"method", "projection", "curvature", "optimizer_model", "single", "all", "seconds", "store_bytes"}
    names = {m.name for m in select("sgd", None)[0]}
    assert {row["method"] for row in whole["rows"]} == names
    for row in whole["rows"]:
        assert keys <= row.keys()
        assert len(row["single_seeds"]) == len(row["all_seeds"]) == 2
        assert row["single"] == pytest.approx(sum(row["single_seeds"]) / 2)
        assert -1 <= row["all"] <= 1
        assert row["seconds"] > 0
        for kind in ("single", "all"):
            assert row[f"{kind}_interval"]["lower"] <= row[f"{kind}_interval"]["upper"]
        if row["method"] != "paper":
            interval = row["single_against_paper"]
            assert interval["lower"] <= interval["mean"] <= interval["upper"]
    assert {"single", "all", "single_interval", "all_interval"} <= whole["ceiling"].keys()
    assert whole["contrasts"]


def test_the_ceiling_of_a_smooth_short_run_is_near_1(whole: dict[str, Any]) -> None:
    assert whole["ceiling"]["single"] > 0.97
    single, every = (whole["ceiling"][kind] for kind in ("single", "all"))
    assert single == pytest.approx(every), "one epoch: both removals are the same"


def test_methods_that_follow_the_run_are_good_here(whole: dict[str, Any]) -> None:
    by_name = {row["method"]: row for row in whole["rows"]}
    for name in ("paper", "full-exact", "learned-16-exact", "no-propagation"):
        assert by_name[name]["single"] > 0.9, name


def test_the_same_study_twice_gives_the_same_table() -> None:
    once, again = (without_seconds(study(TINY, [0], count=6, only=FEW).as_dict()) for _ in range(2))
    assert_alike(once, again)


def test_a_perfect_predictor_scores_1_and_its_opposite_minus_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def cheat(sign: float) -> Any:
        def scores(problem: Problem) -> Scores:
            single, every = removals(problem.setup, problem.seed, len(problem.samples))
            truth = leave_out(
                lambda: recipe(problem.setup, problem.seed),
                [*single, *every],
                fidelity.QUERY,
                dtype=torch.float64,
            )[:, 0]
            return Scores(*(sign * truth).split(len(problem.samples)))

        return scores

    rows = [Method("paper", "", "", "", cheat(-1.0)), Method("cheat", "", "", "", cheat(1.0))]
    monkeypatch.setattr(fidelity, "methods", lambda optimizer: rows)
    found = study(TINY, [0, 1], count=8).as_dict()["rows"]
    assert [row["single_seeds"] for row in found] == [pytest.approx([-1.0, -1.0]), pytest.approx([1.0, 1.0])]
    assert found[1]["single_interval"]["lower"] > 0.99, "however the removals are drawn, the order is right"
    assert found[1]["all_against_paper"]["mean"] == pytest.approx(2.0)
    assert found[1]["all_against_paper"]["lower"] > 1.9


def test_a_swept_setting_is_chosen_on_the_half_that_is_not_scored() -> None:
    """Setting "even" is right on the even removals and wrong on the odd ones: it must be chosen, and score badly."""
    seed = one_seed(TINY, 0, 8, select("sgd", ["paper"])[0], None, lambda *_: None)
    truth = seed.truth["single"]
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)
    pairs = {"odd": (-signs * truth,) * 2, "even": (signs * truth,) * 2}
    method = Method("swept", "", "", "", lambda p: Scores(truth, truth, settings=pairs))
    problem = Problem(TINY, 0, None, list(range(8)), Path())  # type: ignore[arg-type]
    seen = fidelity._seen(method, problem, seed.truth)
    assert seen.chosen == {"single": "even", "all": "even"}
    assert seen.counted.tolist() == [1, 3, 5, 7]
    seed.methods["swept"] = seen
    assert seed.spearman("swept", "single") == pytest.approx(-1.0)
    assert len(seed.pair("swept", "paper", "single").truth) == 4


def test_the_cache_of_truth_is_used(tmp_path: Path) -> None:
    first = study(TINY, [0], count=4, only=["paper"], cache=tmp_path).as_dict()
    files = sorted(p for p in tmp_path.rglob("*.json"))
    assert len(files) >= 4
    again = study(TINY, [0], count=4, only=["paper"], cache=tmp_path).as_dict()
    assert_alike(without_seconds(again), without_seconds(first))


def test_unknown_methods_are_named() -> None:
    with pytest.raises(UsageError, match="found method 'magic'; expected one of paper"):
        select("sgd", ["magic"])


def test_rows_that_are_not_for_the_optimizer_are_left_out_with_a_reason() -> None:
    for optimizer, gone in (
        ("sgd", {"full-exact-factored", "full-empirical-factored"}),
        ("momentum", {"full-exact-factored", "full-empirical-factored", "full-exact-corrected"}),
        ("adamw", {"full-exact-corrected"}),
    ):
        chosen, skipped = select(optimizer, None)
        why = dict(line.split(": ") for line in skipped)
        assert not gone & {m.name for m in chosen}
        assert gone == {name for name, reason in why.items() if reason.endswith(" only")}


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_knowing_the_optimizer_beats_the_proxy(optimizer: str) -> None:
    rows = ["paper", "full-empirical-auto", "full-exact"]
    found = study(setup_of("tiny", "gelu", optimizer, 4), [0, 1], count=16, only=rows).as_dict()
    paper, auto, exact = (row["all"] for row in found["rows"])
    assert found["ceiling"]["all"] > 0.95
    assert min(auto, exact) > 0.9
    assert min(auto, exact) > paper
