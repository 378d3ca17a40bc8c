"""The GPT study on a run of seconds: keys, determinism, and scores that are known beforehand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.bench.recording import STUDIED
from experiments.gpt.methods import methods
from experiments.gpt.problem import Method, Problem, Recording, Scores
from experiments.gpt.setups import domain_losses, recipe, removals
from experiments.gpt.study import CONTRASTS, projection, select, study
from tests.experiments.gpt.test_setups import TINY, without_network

from backstory.errors import NumericalError, UsageError
from backstory.exact.leave_out import leave_out
from experiments.gpt import study as gpt

FEW = ["paper", "full-empirical", "default", "gradient-dot", "influence-swept"]
KEYS = {
    "method", "projection", "curvature", "groups", "optimizer_model", "dims", "mean", "seeds", "interval", "against_paper",
    "recording_ratio", "bytes_per_occurrence", "seconds", "default",
}  # fmt: skip
ABOUT = {"projection": "", "curvature": "", "groups": 1, "optimizer_model": "", "dims": 1}


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def found(text: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(TINY, [0, 1], count=8, only=FEW, cache=tmp_path_factory.mktemp("cache"))


def row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in found["rows"] if r["method"] == name)


def truth(seed: int, count: int) -> torch.Tensor:
    queries = recipe(TINY, seed).queries["domains"]
    return leave_out(lambda: recipe(TINY, seed), removals(TINY, seed, count), lambda m: domain_losses(m, queries), dtype=torch.float64)  # fmt: skip


def test_every_row_has_its_keys(found: dict[str, Any]) -> None:
    assert [r["method"] for r in found["rows"]] == FEW
    for r in found["rows"]:
        assert r.keys() >= KEYS
        assert len(r["seeds"]) == 2
        assert r["mean"] == pytest.approx(sum(r["seeds"]) / 2)
        assert r["interval"]["lower"] <= r["mean"] <= r["interval"]["upper"]
        assert (r["against_paper"] is None) == (r["method"] == "paper")
    assert [r["method"] for r in found["rows"] if r["default"]] == ["default"]
    assert {"mean", "seeds", "interval"} == found["ceiling"].keys()
    assert json.loads(json.dumps(found)) == found


def test_the_ceiling_has_the_sign_of_the_truth(found: dict[str, Any]) -> None:
    """A quarter of a batch in the first steps of Adam is far from a small change: 0.76, not 0.98."""
    assert found["ceiling"]["mean"] > 0.5


def test_differences_are_those_of_the_means(found: dict[str, Any]) -> None:
    paper, ours = row(found, "paper"), row(found, "full-empirical")
    assert ours["against_paper"]["mean"] == pytest.approx(ours["mean"] - paper["mean"])


def test_contrasts_are_those_of_the_rows_that_were_run(found: dict[str, Any]) -> None:
    """A swept row counts half of the removals, so that its difference is not that of the means."""
    assert [(c["method"], c["against"]) for c in found["contrasts"]] == [("default", "influence-swept")]
    assert found["contrasts"][0]["lower"] <= found["contrasts"][0]["mean"] <= found["contrasts"][0]["upper"]


def test_contrasts_and_benchmarks_name_rows_that_exist() -> None:
    known = {m.name for m in methods()}
    assert {name for pair in CONTRASTS for name in pair} <= known
    assert set(STUDIED.values()) <= known


def test_a_swept_row_is_scored_on_the_other_half(found: dict[str, Any]) -> None:
    swept = row(found, "influence-swept")
    assert swept["removals_counted"] == 4
    assert all(setting.startswith("damping") for setting in swept["chosen"])
    assert row(found, "paper")["removals_counted"] == 8


def test_the_setting_is_chosen_on_even_removals_only() -> None:
    known = torch.arange(32.0, dtype=torch.float64).reshape(8, 4)
    even_right, odd_right = known.clone(), known.clone()
    even_right[1::2] *= -1
    odd_right[::2] *= -1
    scores = Scores(known, ABOUT, 0.0, settings={"a": odd_right, "b": even_right})
    seen = gpt._seen(scores, known)
    assert seen.chosen == "b"
    assert seen.counted.tolist() == [1, 3, 5, 7]


def test_a_perfect_predictor_scores_1_and_its_opposite_minus_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def cheat(sign: float) -> Any:
        def scores(problem: Problem, made: Recording | None) -> Scores:
            return Scores(sign * truth(problem.seed, len(problem.samples)), ABOUT, 0.0)

        return scores

    monkeypatch.setattr(gpt, "methods", lambda: [Method("paper", cheat(-1.0)), Method("cheat", cheat(1.0))])
    paper, ours = study(TINY, [0, 1], count=6)["rows"]
    assert paper["seeds"] == pytest.approx([-1.0, -1.0])
    assert ours["seeds"] == pytest.approx([1.0, 1.0])
    assert ours["against_paper"] == pytest.approx({"mean": 2.0, "lower": 2.0, "upper": 2.0})


def test_a_row_without_numbers_is_named_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Problem, made: Recording | None) -> Scores:
        raise NumericalError("overflow")

    kept = [m for m in methods() if m.name == "gradient-dot"]
    monkeypatch.setattr(gpt, "methods", lambda: [Method("paper", fails), *kept])
    found = study(TINY, [0], count=4)
    assert found["failed"] == ["paper: seed 0: overflow"]
    assert [r["method"] for r in found["rows"]] == ["gradient-dot"]
    assert found["rows"][0]["against_paper"] is None


def test_a_seed_gives_the_same_numbers_whatever_else_is_asked(found: dict[str, Any]) -> None:
    again = study(TINY, [1], count=8, only=["default", "influence-swept"])
    for r in again["rows"]:
        known = row(found, r["method"])
        assert r["seeds"] == pytest.approx(known["seeds"][1:])
        assert all(
            r[k] == known[k] for k in ("projection", "curvature", "groups", "optimizer_model", "dims", "default")
        )
    assert again["ceiling"]["seeds"] == pytest.approx(found["ceiling"]["seeds"][1:])


def test_rows_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert [m.name for m in select(["trak", "paper"])] == ["paper", "trak"]
    assert len(select(None)) == len(methods()) == len({m.name for m in methods()})
    with pytest.raises(UsageError, match="learned-16-empirical/12"):
        select(["best"])


def test_projections_are_compared_with_the_largest_and_the_truth(tmp_path: Path) -> None:
    found = projection(TINY, [0], ranks=[64, 256, 2], count=6, curvature="empirical", cache=tmp_path)
    assert [(r["method"], r["rank"]) for r in found["rows"]] == [
        (method, rank) for method in ("backstory", "logra") for rank in (2, 64, 256)
    ]
    for r in found["rows"]:
        assert r["largest"] == pytest.approx(sum(r["largest_seeds"]))
        assert r["truth_interval"]["lower"] <= r["truth"] <= r["truth_interval"]["upper"]
        assert r["largest"] < 1 if r["rank"] == 2 else r["largest"] > 0.5
    assert [r["largest"] for r in found["rows"] if r["rank"] == 256] == pytest.approx([1.0, 1.0])
    assert found["rows"][0]["dims"] < found["rows"][1]["dims"] < found["rows"][2]["dims"]
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(UsageError, match="two or more"):
        projection(TINY, [0], ranks=[4])
