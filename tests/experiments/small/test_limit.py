"""The curve of the theorem, as plain values."""

import json

import pytest
from experiments.small.limit import study
from experiments.small.limit_curve import large_t_limit

from backstory.errors import UsageError


def test_the_curves_are_those_of_the_truth_and_go_to_1() -> None:
    said: list[tuple[str, int, int]] = []
    found = study(["logistic"], [300, 20], range(4), rate=0.1, batch=32, say=lambda *x: said.append(x))
    (curve,) = found["curves"]
    expected = large_t_limit("logistic", steps=(20, 300), seeds=range(4), rate=0.1, batch=32)
    assert [p["steps"] for p in curve["points"]] == [20, 300]
    assert [p["ratio"] for p in curve["points"]] == pytest.approx(list(expected.ratios))
    assert [p["error"] for p in curve["points"]] == pytest.approx(list(expected.errors))
    assert abs(curve["points"][1]["ratio"] - 1) < 0.1 < abs(curve["points"][0]["ratio"] - 1)
    assert said == [("logistic: retrain", 1, 2), ("logistic: retrain", 2, 2)]
    assert json.loads(json.dumps(found)) == found


def test_steps_and_rate_must_be_positive() -> None:
    with pytest.raises(UsageError, match="above 0"):
        study(steps=[0])
    with pytest.raises(UsageError, match="above 0"):
        study(rate=0.0)
