"""The whole study on a run of seconds: keys, determinism, and scores that are known beforehand."""

from typing import Any

import pytest
from experiments.data.images import setup_of
from experiments.fidelity.methods import methods
from experiments.fidelity.study import CONTRASTS, study
from experiments.harness import select
from tests.support.plain import assert_alike

TINY = setup_of("tiny", "gelu", "sgd")
FEW = ["paper", "learned-16-sampled-1", "no-propagation", "influence-swept"]


def without_seconds(actual: dict[str, Any]) -> dict[str, Any]:
    return {**actual, "rows": [{k: v for k, v in row.items() if k != "seconds"} for row in actual["rows"]]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(TINY, [0, 1], count=6, cache=tmp_path_factory.mktemp("cache")).as_dict()


def test_every_row_has_its_keys(whole: dict[str, Any]) -> None:
    keys = {"method", "projection", "curvature", "optimizer_model", "single", "all", "seconds", "store_bytes"}
    names = {m.name for m in select(methods("sgd"), None)[0]}
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


def test_contrasts_name_rows_that_exist() -> None:
    assert {name for pair in CONTRASTS for name in pair} <= {m.name for m in methods("adamw")}


def test_rows_that_are_not_for_the_optimizer_are_left_out_with_a_reason() -> None:
    for optimizer, gone in (
        ("sgd", {"full-exact-factored", "full-empirical-factored"}),
        ("momentum", {"full-exact-factored", "full-empirical-factored", "full-exact-corrected"}),
        ("adamw", {"full-exact-corrected"}),
    ):
        chosen, skipped = select(methods(optimizer), None)
        why = dict(line.split(": ") for line in skipped)
        assert not gone & {m.name for m in chosen}
        assert gone == {name for name, reason in why.items() if reason.endswith(" only")}


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_knowing_the_optimizer_beats_the_proxy(optimizer: str) -> None:
    rows = ["paper", "full-empirical-auto", "full-exact"]
    actual = study(setup_of("tiny", "gelu", optimizer, 4), [0, 1], count=16, only=rows).as_dict()
    paper, auto, exact = (row["all"] for row in actual["rows"])
    assert actual["ceiling"]["all"] > 0.95
    assert min(auto, exact) > 0.9
    assert min(auto, exact) > paper
