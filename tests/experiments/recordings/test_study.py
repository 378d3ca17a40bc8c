"""Recordings of a classifier beside exact derivatives, on a net that trains in a second."""

import json

import pytest
import torch
from experiments.__main__ import app
from experiments.data.images import recipe, setup_of
from experiments.fidelity.methods import QUERY
from experiments.recordings.study import RECORDED, study
from typer.testing import CliRunner

from backstory.exact.check import spearman
from backstory.exact.reverse import reverse


def test_every_row_has_its_correlations_and_its_cost() -> None:
    result = study(setup_of("tiny", "gelu", "adamw", 2), [3, 4], only=["default", "learned-16-empirical"])
    default, own = result["rows"]
    assert (default["curvature"], own["curvature"]) == ("ggn:1", "empirical")
    assert own["passes"] == 0
    assert 0 < default["passes"] <= 0.5
    for row in result["rows"]:
        assert len(row["single_seeds"]) == len(row["all_seeds"]) == 2
        assert row["single"] == pytest.approx(sum(row["single_seeds"]) / 2)
        assert row["store_bytes"] > 0
    assert default["single"] > 0.8


def test_exact_scores_are_those_of_a_sweep_of_ones_own() -> None:
    setup = setup_of("tiny", "gelu", "sgd", 1)
    expected = reverse(lambda: recipe(setup, 3), QUERY, dtype=torch.float64).scores.mean(0)
    assert spearman(expected, expected) == pytest.approx(1.0)
    (row,) = study(setup, [3], only=["best"])["rows"]
    assert row["single"] > 0.9


def test_the_command_emits_json() -> None:
    done = CliRunner().invoke(app, ["recordings", "--model", "tiny", "--seeds", "1", "--methods", "fast", "--json"])
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert [row["recording"] for row in result["rows"]] == ["fast"]
    assert set(RECORDED) >= {"default", "fast", "best"}
