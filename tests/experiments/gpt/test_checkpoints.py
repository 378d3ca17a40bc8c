"""Runs from checkpoints against retraining, on made-up text."""

import pytest
from experiments.gpt.checkpoints import _rows, _some, study
from tests.experiments.gpt.test_setups import TINY, without_network

from backstory.recording.from_checkpoints import Given

text = pytest.fixture(autouse=True)(without_network)


def test_with_every_checkpoint_before_its_step_the_agreement_is_that_of_the_recording() -> None:
    stages: list[tuple[str, int, int]] = []
    actual = study(TINY, [1], numbers=[2, None], count=5, rank=3, say=lambda *x: stages.append(x))
    rows = {(r["checkpoints"], r["nearest"], r["moments"]): r for r in actual["rows"]}
    assert len(rows) == 7
    assert rows[6, "before", True]["each"] == pytest.approx(rows[None, "recorded", True]["each"])
    assert rows[2, "after", True]["each"] != pytest.approx(rows[None, "recorded", True]["each"])
    assert all([r["mean"]] == r["each"] for r in actual["rows"])
    assert all(-1 <= x <= 1 for r in actual["rows"] for x in r["each"])
    assert ("seed 1: runs", 7, 7) in stages


def test_checkpoints_are_spread_evenly_and_end_with_the_run() -> None:
    kept: list[Given] = [(t, {}, {}) for t in range(101)]
    assert [x[0] for x in _some(kept, 5, True)] == [0, 20, 40, 60, 80, 100]
    assert [x[0] for x in _some(kept, 100, True)] == list(range(101))
    assert all(x[2] is None for x in _some(kept, 3, False))
    assert [r.checkpoints for r in _rows(TINY, [50])] == [None, 6, 6, 6]
