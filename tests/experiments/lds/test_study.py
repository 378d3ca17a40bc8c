"""LDS on a very small run: drops, the score itself, seconds, and going on after an interruption."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.lds.bm25 import bm25
from experiments.lds.study import (
    EXACT,
    TRUTH,
    WHICH,
    Known,
    LdsSetup,
    Meter,
    Scored,
    drops,
    each_query,
    over_queries,
    problem_of,
    rows,
    run_seed,
    study,
)
from tests.exact.test_spearman import counted
from tests.experiments.gpt.test_setups import TINY as GPT
from tests.experiments.gpt.test_setups import without_network
from tests.support.oracles import assert_same

from backstory.exact.leave_out import leave_out

TINY = LdsSetup(gpt=GPT, drops=5, share=0.1, queries=6)


@pytest.fixture(autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


def test_drops_are_shares_of_the_training_set_drawn_by_the_seed() -> None:
    ids = [str(k) for k in range(200)]
    made = drops(LdsSetup(gpt=GPT), 3, ids)
    assert [len(gone.samples) for gone in made] == [2] * 100
    assert all(len(set(gone.samples)) == 2 and gone.steps is None for gone in made)
    assert len({gone.samples for gone in made}) > 90
    assert made == drops(LdsSetup(gpt=GPT), 3, ids) != drops(LdsSetup(gpt=GPT), 4, ids)


def test_queries_are_single_texts_of_all_domains() -> None:
    problem = problem_of(TINY, 0)
    assert problem.queries.shape == (6, 13)
    assert len(problem.queries.unique(dim=0)) == 6
    trained = torch.cat([tokens for _, tokens in problem.make().batches])
    assert not {tuple(x) for x in problem.queries.tolist()} & {tuple(x) for x in trained.tolist()}


def test_the_score_is_the_mean_of_the_queries_rank_correlations() -> None:
    g = torch.Generator().manual_seed(0)
    scores, truth = torch.randn(30, 4, generator=g), torch.randn(30, 4, generator=g)
    ranks = [np.argsort(np.argsort(x.numpy(), axis=0), axis=0) for x in (scores, truth)]
    expected = [np.corrcoef(ranks[0][:, q], ranks[1][:, q])[0, 1] for q in range(4)]
    assert each_query(scores, truth).tolist() == pytest.approx(expected)
    assert each_query(truth, truth).tolist() == pytest.approx([1.0] * 4)


def test_the_interval_draws_queries_within_seeds() -> None:
    each = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = over_queries([each])
    half = 1.96 * float(each.std(correction=0)) / 50**0.5
    assert (low, high) == pytest.approx((float(each.mean()) - half, float(each.mean()) + half), abs=0.1 * half)
    assert over_queries([torch.zeros(9, dtype=torch.float64), torch.ones(9, dtype=torch.float64)]) == (0.0, 1.0)


def test_the_interval_of_a_row_draws_drops_for_all_queries_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that are all alike: drawing queries has no width, drawing drops has the whole of it."""
    monkeypatch.setattr("experiments.lds.study.DRAWS", 400)
    g = torch.Generator().manual_seed(2)
    truth = torch.randn(30, 1, generator=g, dtype=torch.float64)
    scores = truth + torch.randn(30, 1, generator=g, dtype=torch.float64)
    known = Known(truth.expand(-1, 4), {"row": scores.expand(-1, 4)}, dict.fromkeys(("row", TRUTH, "training"), 1.0))
    monkeypatch.setattr("experiments.lds.study.run_seed", lambda *_: known)
    monkeypatch.setattr("experiments.lds.study.rows", lambda: {"row": None})
    (row,) = study(TINY, [0])["rows"]
    assert row["over_queries"] == {"lower": pytest.approx(row["mean"]), "upper": pytest.approx(row["mean"])}
    drawn = []
    for _ in range(400):
        i = torch.randint(30, (30,), generator=g)
        drawn.append(counted(scores[i, 0], truth[i, 0]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (row["interval"]["lower"], row["interval"]["upper"]) == pytest.approx((low, high), abs=0.08)


def test_truth_is_retraining_and_a_row_sums_over_what_is_dropped() -> None:
    problem = problem_of(TINY, 0)
    truth = problem.truth()[WHICH]
    again = leave_out(
        problem.make, problem.removals[WHICH][:2], lambda m: problem.loss(m, problem.queries), vectorised=False,
        dtype=torch.float64,
    )  # fmt: skip
    assert_same(truth[:2], again, 6 * 4 * 13 * 256)
    exact, sums = problem.exact(torch.float32), rows()[EXACT](problem)
    for gone, row in zip(problem.removals[WHICH], sums, strict=True):
        member = torch.tensor([str(name) in gone.samples for name in exact.sample_ids])
        assert int(member.sum()) == 2
        assert_same(row, exact.scores[:, member].sum(1), 2)


def test_bm25_sums_over_what_is_dropped() -> None:
    problem = problem_of(TINY, 0)
    texts = {
        str(i): bytes(x.tolist()).decode()
        for ids, rows in problem.make().batches
        for i, x in zip(ids, rows, strict=True)
    }
    asked = [bytes(x.tolist()).decode() for x in problem.queries]
    scores = dict(zip(texts, bm25(asked, list(texts.values())).T, strict=True))
    for gone, row in zip(problem.removals[WHICH], rows()["BM25"](problem), strict=True):
        assert row.tolist() == pytest.approx(sum(scores[str(name)] for name in gone.samples).tolist())


@pytest.mark.slow
def test_every_row_has_a_score_and_seconds() -> None:
    result = study(TINY, [0])
    assert [row["method"] for row in result["rows"]] == list(rows())
    for row in result["rows"]:
        assert -1 <= row["interval"]["lower"] <= row["mean"] <= row["interval"]["upper"] <= 1
        assert row["cpu_seconds"] > 0


def test_rows_are_stored_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: rows()[name] for name in ("gradient cosine", "BM25")}
    truth, made, seconds = run_seed(TINY, 0, chosen, tmp_path, lambda *_: None)
    assert seconds.keys() == {TRUTH, "training", "gradient cosine", "BM25"}

    def refused(problem: object) -> torch.Tensor:
        raise AssertionError("a row that is known is not made again")

    same, again, later = run_seed(TINY, 0, dict.fromkeys(chosen, refused), tmp_path, lambda *_: None)
    assert same.tolist() == truth.tolist()
    for name, values in made.items():
        assert again[name].tolist() == values.tolist()
        assert later[name] == seconds[name]
    assert later[TRUTH] == seconds[TRUTH], "what was done before is not counted again"
    assert json.loads((tmp_path / f"lds-{GPT.mode}-0" / "seconds.json").read_text()) == later


def test_seconds_of_shared_work_are_cpu_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU clock that stands still no row takes any time, nor one that uses what another made, however long they wait."""
    monkeypatch.setattr("experiments.lds.study.time.process_time", lambda: 7.0)
    chosen: dict[str, Scored] = {
        name: lambda p: p.once("shared", lambda: torch.rand(5, 6)) for name in ("first", "second")
    }
    *_, seconds = run_seed(TINY, 0, chosen, tmp_path, lambda *_: None)
    assert {seconds[name] for name in chosen} == {0.0}
    assert json.loads((tmp_path / f"lds-{GPT.mode}-0" / "seconds.json").read_text()) == seconds


def test_seconds_of_interrupted_work_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 100.0, 102.0])
    monkeypatch.setattr("experiments.lds.study.time.process_time", lambda: next(clock))

    def interrupted() -> None:
        with Meter(tmp_path / "s.json").measure("work") as note:
            note()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with Meter(tmp_path / "s.json").measure("work"):
        pass
    assert json.loads((tmp_path / "s.json").read_text()) == {"work": 7.0}
