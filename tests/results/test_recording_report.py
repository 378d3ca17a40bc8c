"""One verdict with the reason that weighs most, and sentences that follow the numbers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from backstory.results.quality import EARLY, Quality
from backstory.results.row import plain

SOUND = Quality(
    steps=252, optimizer="SGD", curvature="exact:10", projection="learned", retained=0.9, largest_growth=0.8, largest_growth_step=248
)  # fmt: skip
PROXY = "as plain SGD steps, without momentum 0.9"


@pytest.mark.parametrize(
    ("more", "verdict", "reason"),
    [
        ({}, "good", "SGD's steps are modelled exactly."),
        ({"retained": 0.13}, "weak", "The projection retains 13% of the gradients' squared norm."),
        ({"retained": 0.6}, "fair", "retains 60%"),
        ({"retained": 0.13, "projection": "random"}, "good", "SGD's steps are modelled exactly."),
        ({"coverage": 0.95}, "fair", "cover 95.0% of the gradient"),
        ({"coverage": 0.4}, "weak", "40.0%"),
        ({"proxy": True, "modelled": PROXY}, "weak", f"SGD's steps are modelled {PROXY}."),
        ({"proxy": False, "modelled": "so that no proxy is needed"}, "good", "no proxy"),
        ({"curvature": "empirical/6"}, "fair", "empirical Fisher"),
        ({"largest_growth": 1.5, "expanding_steps": (1, 216)}, "fair", "150% of the stability limit (at step 248); 2 of 252 steps are above it. Samples used up to then get less reliable scores"),
        ({"drift": 0.2}, "fair", "20.0%"),
        ({"drift": 0.05}, "good", "exactly"),
        ({"curvature": "empirical", "retained": 0.2}, "weak", "retains 20%"),
    ],
)  # fmt: skip
def test_the_verdict_is_that_of_the_heaviest_reason(more: dict[str, Any], verdict: str, reason: str) -> None:
    quality = replace(SOUND, **more)
    assert quality.verdict == verdict
    assert reason in quality.reason
    assert quality.reason in quality.words
    assert str(quality) == f"{verdict}: {quality.reason}"


def test_where_nothing_was_measured_nothing_is_claimed() -> None:
    nothing = Quality()
    assert (nothing.verdict, nothing.words, nothing.early) == ("not known", (), EARLY)
    assert "was not measured for this model" in nothing.reason


def test_weaknesses_come_first() -> None:
    bad = replace(SOUND, clipped=0.5, coverage=0.7, proxy=True, modelled=PROXY, curvature="empirical", retained=0.3)
    assert [w.split()[0] for w in bad.words] == ["SGD's", "Recorded", "The", "Curvature", "Peak", "50%"]
    assert "empirical" not in " ".join(SOUND.words)


def test_a_report_is_stored_as_json_and_read_back() -> None:
    report = replace(SOUND, expanding_steps=(3, 5), drift=0.1)
    assert Quality.from_dict(json.loads(json.dumps(report.measured()))) == report
    assert Quality.from_dict(json.loads(json.dumps(report.as_dict()))) == report
    assert report.as_dict()["verdict"] == report.verdict
    assert plain(replace(SOUND, drift=float("nan")).as_dict())["drift"] is None
