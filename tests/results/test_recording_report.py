"""Sentences about a recording follow the numbers, and judge nothing."""

import json
from dataclasses import replace
from typing import Any

import pytest

from backstory.results.recording_report import EARLY, RecordingReport
from backstory.results.row import plain

SOUND = RecordingReport(
    steps=252, optimizer="SGD", curvature="exact:10", projection="learned", retained=0.9, largest_growth=0.8, largest_growth_step=248
)  # fmt: skip
PROXY = "as plain SGD steps, without momentum 0.9"


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({}, "SGD's steps are modelled exactly."),
        ({"retained": 0.13}, "The projection retains 13% of the gradients' squared norm."),
        ({"coverage": 0.95}, "Recorded parameters cover 95.0% of the gradient (squared norm)."),
        ({"proxy": True, "modelled": PROXY}, f"SGD's steps are modelled {PROXY}."),
        ({"curvature": "empirical/6"}, "Curvature is the empirical Fisher, computed from the gradients alone; sampled Fisher or exact GGN curvature is more accurate."),
        ({"largest_growth": 1.5, "expanding_steps": (1, 216)}, "Peak learning rate × curvature is 150% of the stability limit (at step 248); 2 of 252 steps are above it. Samples used up to then get less reliable scores; a lower or slower-rising learning rate avoids it."),
        ({"drift": 0.2}, "Per-parameter learning rates change by 20.0% from step to step; this change is ignored."),
        ({"drift": 0.05}, "SGD's steps are modelled exactly."),
    ],
)  # fmt: skip
def test_what_costs_accuracy_comes_first(more: dict[str, Any], first: str) -> None:
    report = replace(SOUND, **more)
    assert report.words[0] == first
    assert len(set(report.words)) == len(report.words)


def test_a_random_projection_is_not_judged_by_what_it_retains() -> None:
    assert not any("retains" in text for text in replace(SOUND, projection="random", retained=0.1).words)


def test_what_holds_of_every_recording_is_said_where_there_are_steps() -> None:
    assert EARLY in SOUND.words
    assert RecordingReport().words == ()


def test_all_that_costs_accuracy_comes_before_the_rest() -> None:
    bad = replace(SOUND, clipped=0.5, coverage=0.7, proxy=True, modelled=PROXY, curvature="empirical", retained=0.3)
    assert [w.split()[0] for w in bad.words] == ["SGD's", "Recorded", "The", "Curvature", "Peak", "50%", "Recorded"]
    assert "empirical" not in " ".join(SOUND.words)


def test_no_adjective_judges_a_recording() -> None:
    worst = replace(SOUND, coverage=0.1, retained=0.01, proxy=True, modelled=PROXY, curvature="empirical", drift=1.0)
    assert not {"good", "fair", "weak", "trust"} & set(" ".join((*SOUND.words, *worst.words)).casefold().split())


def test_a_report_is_stored_as_json_and_read_back() -> None:
    report = replace(SOUND, expanding_steps=(3, 5), drift=0.1)
    assert RecordingReport.from_dict(json.loads(json.dumps(report.measured()))) == report
    assert RecordingReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report
    assert plain(replace(SOUND, drift=float("nan")).as_dict())["drift"] is None
