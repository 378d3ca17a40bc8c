"""Random projections on a run of seconds, against the largest and the truth."""

import json
from pathlib import Path

import pytest
from experiments.gpt.projection import study
from tests.experiments.gpt.test_setups import TINY, without_network

from backstory.errors import UsageError

text = pytest.fixture(autouse=True)(without_network)


def test_projections_are_compared_with_the_largest_and_the_truth(tmp_path: Path) -> None:
    actual = study(TINY, [0], ranks=[64, 256, 2], count=6, curvature="empirical", cache=tmp_path)
    assert [(r["method"], r["rank"]) for r in actual["rows"]] == [
        (method, rank) for method in ("backstory", "logra") for rank in (2, 64, 256)
    ]
    for r in actual["rows"]:
        assert r["largest"] == pytest.approx(sum(r["largest_seeds"]))
        assert r["truth_interval"]["lower"] <= r["truth"] <= r["truth_interval"]["upper"]
        assert r["largest"] < 1 if r["rank"] == 2 else r["largest"] > 0.5
    assert [r["largest"] for r in actual["rows"] if r["rank"] == 256] == pytest.approx([1.0, 1.0])
    assert actual["rows"][0]["dims"] < actual["rows"][1]["dims"] < actual["rows"][2]["dims"]
    assert json.loads(json.dumps(actual)) == actual
    with pytest.raises(UsageError, match="two or more"):
        study(TINY, [0], ranks=[4])
