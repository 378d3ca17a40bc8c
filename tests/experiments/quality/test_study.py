"""The quality study on a tiny regression, and its verdicts on made-up numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.__main__ import app
from experiments.pages import read_tables
from experiments.quality.runs import KINDS, QUERIES, Kind, regression
from experiments.quality.study import compare
from typer.testing import CliRunner

from backstory import Recipe
from backstory.results.quality import Agreement, FirstOrder, Quality

TRUTH = torch.arange(60.0, dtype=torch.float64)
THIRD = torch.arange(60) // 20


def measured(rank: float, first_order: float = 1.0) -> Quality:
    thirds = tuple(Agreement(k, k + 1, rank, rank, rank, 20) for k in range(3))
    whole = Agreement(0, 3, rank, rank, rank, 60)
    return Quality(on="x", whole=whole, thirds=thirds, first_order=FirstOrder(first_order, 0.0, 1.0, 24, 24))


def noisy(rank: float) -> torch.Tensor:
    """Predictions whose rank correlation with the truth is about this."""
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (TRUTH - TRUTH.mean()) / TRUTH.std()
    out: torch.Tensor = rank * x + (1 - rank**2) ** 0.5 * noise
    return out


def test_quality_is_right_where_it_lies_in_the_interval() -> None:
    row = compare(measured(0.5), noisy(0.5), TRUTH, THIRD)
    assert row["right"]
    assert row["retraining"]["lower"] < 0.5 < row["retraining"]["upper"]
    assert not compare(measured(0.95), noisy(0.5), TRUTH, THIRD)["right"]
    assert not compare(measured(-0.5), noisy(0.5), TRUTH, THIRD)["right"]


def test_the_worse_of_both_is_what_is_judged() -> None:
    assert compare(measured(0.95, first_order=0.5), noisy(0.5), TRUTH, THIRD)["right"]


def test_thirds_are_judged_by_the_worse_of_their_own_two() -> None:
    limits = tuple(Agreement(k, k + 1, x, x, x, 8) for k, x in enumerate((0.2, 0.5, 0.99)))
    row = compare(replace(measured(0.7, first_order=0.5), retrained=limits), noisy(0.7), TRUTH, THIRD)
    assert row["thirds"]["quality"] == [0.2, 0.5, 0.7]
    assert row["quality"] == 0.5


def test_a_run_is_flattered_where_it_ranks_badly_and_is_said_to_rank_well() -> None:
    assert compare(measured(0.9), noisy(0.2), TRUTH, THIRD)["flattered"]
    assert not compare(measured(0.9, first_order=0.3), noisy(0.2), TRUTH, THIRD)["flattered"]
    assert not compare(measured(0.9), noisy(0.99), TRUTH, THIRD)["flattered"]


def test_every_kind_of_run_that_is_asked_for_is_there() -> None:
    assert len(KINDS) >= 12
    made = regression(0, "adamw")
    assert made.clip_norm == 1.0
    assert len(made.queries[QUERIES][0]) == 517


def short(seed: int) -> Recipe:
    made = regression(seed, "adamw")
    return replace(made, batches=made.batches[:24])


def test_json_and_page_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = "regression, AdamW, clipped"
    monkeypatch.setitem(KINDS, run, Kind(short))
    page = tmp_path / "quality.md"
    call = ["quality", "--runs", run, "--removals", "9", "--calibrated", "9", "--page", str(page), "--json"]
    done = CliRunner().invoke(app, call, catch_exceptions=False)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    (row,) = result["rows"]
    assert row["run"] == run
    assert row["right"] == (row["retraining"]["lower"] <= row["quality"] <= row["retraining"]["upper"])
    assert result["right"] == int(row["right"])
    table = read_tables(page.read_text())[1]
    assert table["rows"][0][1] == f"{row['quality']:.2f}"
