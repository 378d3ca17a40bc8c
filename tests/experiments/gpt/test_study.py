"""The GPT study on a run of seconds: keys, determinism, and scores that are known beforehand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.bench.recording import STUDIED
from experiments.gpt.methods import methods
from experiments.gpt.setups import domain_losses, recipe
from experiments.gpt.study import CONTRASTS, study
from tests.exact.test_spearman import counted
from tests.experiments.gpt.test_setups import TINY, without_network
from torch import Tensor, nn

import backstory
from backstory.demo.gpt_model import counts
from backstory.exact.leave_out import leave_out
from backstory.exact.reverse import reverse
from backstory.replay.recipe import take_step
from backstory.replay.tape import Removal

FEW = ["exact", "exact-float32", "paper", "full-empirical", "default", "gradient-dot", "influence-swept"]
KEYS = {
    "method", "projection", "curvature", "groups", "optimizer_model", "dims", "mean", "seeds", "interval", "against_paper",
    "recording_ratio", "bytes_per_occurrence", "seconds", "default", "against_exact", "against_exact_seeds",
    "size_against_exact", "thirds",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def actual(text: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(TINY, [0, 1], count=8, only=FEW, cache=tmp_path_factory.mktemp("cache"))


def row(actual: dict[str, Any], name: str) -> dict[str, Any]:
    return next(r for r in actual["rows"] if r["method"] == name)


def test_every_row_has_its_keys(actual: dict[str, Any]) -> None:
    assert [r["method"] for r in actual["rows"]] == FEW
    for r in actual["rows"]:
        assert r.keys() >= KEYS
        assert len(r["seeds"]) == 2
        assert r["mean"] == pytest.approx(sum(r["seeds"]) / 2)
        assert r["interval"]["lower"] <= r["mean"] <= r["interval"]["upper"]
        assert (r["against_paper"] is None) == (r["method"] == "paper")
    assert [r["method"] for r in actual["rows"] if r["default"]] == ["default"]
    assert {"mean", "seeds", "interval", "thirds"} == actual["ceiling"].keys()
    assert json.loads(json.dumps(actual)) == actual


def test_the_ceiling_has_the_sign_of_the_truth(actual: dict[str, Any]) -> None:
    """A quarter of a batch in the first steps of Adam is far from a small change: 0.76, not 0.98."""
    assert actual["ceiling"]["mean"] > 0.5


def test_rows_that_score_every_use_are_compared_with_exact_unrolling(actual: dict[str, Any]) -> None:
    timed = {r["method"] for r in actual["rows"] if r["against_exact"]}
    assert timed == {"exact", "exact-float32", "paper", "full-empirical", "default"}
    for r in actual["rows"]:
        assert (r["size_against_exact"] is None) == (r["method"] not in timed)
        assert r["thirds"] == {"early": None, "middle": None, "late": None}, "eight removals are too few by thirds"


def test_exact_rows_are_the_ceiling_in_two_precisions(actual: dict[str, Any]) -> None:
    whole, half = row(actual, "exact"), row(actual, "exact-float32")
    assert {k: whole[k] for k in actual["ceiling"]} == actual["ceiling"]
    assert whole["against_exact"] == {"early": 1.0, "middle": 1.0, "late": 1.0, "all": 1.0}
    assert 0.995 < half["against_exact"]["all"]
    assert all(0.99 < size < 1.01 for size in half["size_against_exact"].values())
    assert half["size_against_exact"]["all"] != 1.0, "rounding of float32 would show"


def test_thirds_are_those_of_the_steps(text: None, tmp_path: Path) -> None:
    """With every sequence removed: 8 occurrences a third, from a recording and replays made here."""
    actual = study(TINY, [0], count=24, only=["default"])
    plan = recipe(TINY, 0)
    with backstory.record(plan.model, plan.optimizer, tmp_path / "run", loss_reduction="token-mean") as rec:
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=counts(tokens)):
                take_step(plan, t)
    ours = backstory.open(tmp_path / "run").query(plan.model, domain_losses, plan.queries["domains"]).scores

    def queries(model: nn.Module) -> Tensor:
        return domain_losses(model, plan.queries["domains"])

    exact = reverse(lambda: recipe(TINY, 0), queries).scores
    removed = [Removal((name,)) for ids, _ in plan.batches for name in ids]
    truth = leave_out(lambda: recipe(TINY, 0), removed, queries, dtype=torch.float64)
    for k, part in enumerate(("early", "middle", "late")):
        inside = slice(8 * k, 8 * k + 8)
        against = [counted(ours[q, inside], exact[q, inside]) for q in range(4)]
        retrained = [counted(ours[q, inside], truth[inside, q]) for q in range(4)]
        ceiling = [counted(exact[q, inside], truth[inside, q]) for q in range(4)]
        assert row(actual, "default")["against_exact"][part] == pytest.approx(sum(against) / 4)
        assert row(actual, "default")["thirds"][part]["mean"] == pytest.approx(sum(retrained) / 4)
        assert actual["ceiling"]["thirds"][part]["mean"] == pytest.approx(sum(ceiling) / 4)


def test_differences_are_those_of_the_means(actual: dict[str, Any]) -> None:
    paper, ours = row(actual, "paper"), row(actual, "full-empirical")
    assert ours["against_paper"]["mean"] == pytest.approx(ours["mean"] - paper["mean"])


def test_contrasts_are_those_of_the_rows_that_were_run(actual: dict[str, Any]) -> None:
    """A swept row counts half of the removals, so that its difference is not that of the means."""
    assert [(c["method"], c["against"]) for c in actual["contrasts"]] == [("default", "influence-swept")]
    assert actual["contrasts"][0]["lower"] <= actual["contrasts"][0]["mean"] <= actual["contrasts"][0]["upper"]


def test_contrasts_and_benchmarks_name_rows_that_exist() -> None:
    known = {m.name for m in methods()}
    assert {name for pair in CONTRASTS for name in pair} <= known
    assert set(STUDIED.values()) <= known


def test_a_swept_row_is_scored_on_the_other_half(actual: dict[str, Any]) -> None:
    swept = row(actual, "influence-swept")
    assert swept["removals_counted"] == 4
    assert all(setting.startswith("damping") for setting in swept["chosen"])
    assert row(actual, "paper")["removals_counted"] == 8


def test_a_seed_gives_the_same_numbers_whatever_else_is_asked(actual: dict[str, Any]) -> None:
    again = study(TINY, [1], count=8, only=["default", "influence-swept"])
    for r in again["rows"]:
        known = row(actual, r["method"])
        assert r["seeds"] == pytest.approx(known["seeds"][1:])
        assert all(
            r[k] == known[k] for k in ("projection", "curvature", "groups", "optimizer_model", "dims", "default")
        )
    assert again["ceiling"]["seeds"] == pytest.approx(actual["ceiling"]["seeds"][1:])
