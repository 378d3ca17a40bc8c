"""Cells of the ablation on a run of seconds: what they record, and what they are compared with."""

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.data.images import setup_of
from experiments.small.ablation import Cell, grid, study

from backstory.errors import UsageError

TINY = setup_of("tiny", "gelu", "sgd", 2, 64)


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(
        TINY,
        [0, 1],
        ranks=[2, 64],
        projections=["learned", "mask"],
        curvatures=["empirical", "exact:10"],
        warmups=["2", "epoch"],
        count=6,
        cache=tmp_path_factory.mktemp("cache"),
    )


def cell(actual: dict[str, Any], *key: Any) -> dict[str, Any]:
    names = ("projection", "rank", "curvature", "warmup")
    return next(row for row in actual["rows"] if tuple(row[n] for n in names) == key)


def test_every_cell_has_its_row(actual: dict[str, Any]) -> None:
    assert len(actual["rows"]) == 2 * 2 * (2 + 1)
    for row in actual["rows"]:
        for kind in ("full", "single", "all"):
            assert row[kind] == pytest.approx(sum(row[f"{kind}_seeds"]) / 2)
    assert json.loads(json.dumps(actual)) == actual


def test_all_coordinates_give_full_coordinates_scores(actual: dict[str, Any]) -> None:
    """Rank 64 is every coordinate of this net: nothing but float16 is lost."""
    assert cell(actual, "learned", 64, "exact:10", "2")["full"] > 0.999
    assert cell(actual, "mask", 64, "exact:10", "")["full"] > 0.999
    assert cell(actual, "learned", 64, "empirical", "2")["full"] > 0.999
    assert cell(actual, "mask", 2, "exact:10", "")["full"] < 0.99


def test_full_coordinates_are_near_the_truth(actual: dict[str, Any]) -> None:
    rows = {row["curvature"]: row for row in actual["full"]}
    assert rows["exact"]["single"] > 0.9
    assert rows["exact"]["full"] == rows["empirical"]["full"] == 1.0  # of one and the same order
    wide = cell(actual, "learned", 64, "exact:10", "2")
    assert wide["single"] == pytest.approx(rows["exact"]["single"], abs=0.06)
    assert wide["all"] == pytest.approx(rows["exact"]["all"], abs=0.06)


def test_bytes_grow_with_rank_and_rows(actual: dict[str, Any]) -> None:
    small, wide = (cell(actual, "learned", rank, "empirical", "2")["bytes"] for rank in (2, 64))
    assert small < wide
    assert 5 * small < cell(actual, "learned", 2, "exact:10", "2")["bytes"] < 11 * small


def test_only_learned_subspaces_have_a_warm_up() -> None:
    cells = list(grid([4], ["learned", "random"], ["empirical"], ["20", "epoch"]))
    assert cells == [
        Cell("learned", 4, "empirical", "20"),
        Cell("learned", 4, "empirical", "epoch"),
        Cell("random", 4, "empirical"),
    ]
    with pytest.raises(UsageError, match="learned, random, mask"):
        list(grid([4], ["best"], ["empirical"], ["20"]))
    with pytest.raises(UsageError, match="warm-ups"):
        list(grid([4], ["learned"], ["empirical"], ["long"]))


def test_the_truth_is_kept_in_the_folder(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    study(TINY, [0], ranks=[2], projections=["random"], curvatures=["empirical"], count=2, cache=tmp_path, say=lambda *x: said.append(x))  # fmt: skip
    assert any(tmp_path.rglob("*.json"))
    assert said[-1] == ("seed 0: methods", 3, 3)
