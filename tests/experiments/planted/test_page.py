"""The page of the study of planted data shows every method, and needs no network."""

from typing import Any

import pytest
from experiments.planted.page import figure, page

ROWS: list[dict[str, Any]] = [
    {"method": "default", "auroc": 0.9, "lower": 0.8, "upper": 0.95, "seeds": [0.85, 0.95]},
    {"method": "influence", "auroc": 0.6, "lower": 0.5, "upper": 0.7, "seeds": [0.55, 0.65], "chosen": "damping 10"},
]
FOUND: dict[str, Any] = {"kind": "<i>shuffled", "share": 0.05, "rows": ROWS}


def test_page_escapes_words_and_holds_its_script() -> None:
    text = page(FOUND)
    assert "&lt;i&gt;shuffled, 5% of the samples" in text
    assert "<script src=" not in text


def test_means_have_their_intervals_and_seeds_their_points() -> None:
    means, seeds = figure(FOUND).data
    assert list(means.y) == ["default", "influence (damping 10)"]
    assert list(means.error_x.array) == pytest.approx([0.05, 0.1])
    assert list(means.error_x.arrayminus) == pytest.approx([0.1, 0.1])
    assert list(seeds.x) == [0.85, 0.95, 0.55, 0.65]
    assert list(seeds.y) == ["default"] * 2 + ["influence (damping 10)"] * 2
