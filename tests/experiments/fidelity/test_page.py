"""The scatter page shows every point once, the ceiling first, and needs no network."""

import json
import re
from typing import Any

import pytest
import torch
from experiments.data.images import setup_of
from experiments.fidelity.methods import Row
from experiments.fidelity.page import figure, page
from experiments.fidelity.study import Outcome
from experiments.harness import CEILING, Scores, Seed
from experiments.harness import Row as SeedRow


def outcome() -> Outcome:
    truth = torch.arange(4, dtype=torch.float64)[:, None]
    both, half = {"single": truth, "all": truth}, {"single": 2 * truth, "all": -truth}
    rows = {
        CEILING: SeedRow(both, torch.arange(4), Scores(both)),
        "<half>": SeedRow(half, torch.tensor([1, 3]), Scores(half)),
    }
    seeds = [Seed({"single": truth + k, "all": truth}, rows) for k in (0, 7)]
    return Outcome(setup_of("tiny", "gelu", "adamw"), [3, 5], 4, [Row("<half>", lambda p: Scores({}))], seeds, [])


def traces() -> list[dict[str, Any]]:
    actual: list[dict[str, Any]] = json.loads(figure(outcome()).to_json())["data"]
    return actual


def test_truth_is_across_and_scores_are_upward() -> None:
    pytest.importorskip("plotly")
    actual = traces()
    assert len(actual) == 2 * 2 * 2, "ceiling and one method, single and all, two seeds"
    assert actual[0]["name"] == "seed 3"
    assert actual[0]["y"] == [0, 1, 2, 3], "the ceiling comes first"
    half = actual[5]  # the method, single, seed 5
    assert (half["x"], half["y"]) == ([8, 10], [2, 6]), "only the removals that count"


def test_a_seed_has_one_colour_everywhere_and_one_entry_in_the_legend() -> None:
    actual = traces()
    colours = {name: {t["marker"]["color"] for t in actual if t["name"] == name} for name in ("seed 3", "seed 5")}
    assert all(len(c) == 1 for c in colours.values())
    assert colours["seed 3"] != colours["seed 5"]
    assert sum(t["showlegend"] for t in actual) == 2


def test_the_page_is_whole() -> None:
    text = page(outcome())
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "http" not in outside, "nothing is loaded from elsewhere"
    assert not re.search(r"<script[^>]*\ssrc=", text[:20_000]), "nor is Plotly"
    assert len(text) > 1_000_000, "Plotly is in the page"
    assert "tiny" not in outside
    assert "mlp, gelu, adamw, 1 epochs" in outside
    assert "exact unrolling (ceiling): single, 1.000" in text
    assert "all, -1.000" in text
