"""Plain and recorded training are the same training; sizes are those of the files."""

from pathlib import Path

import pytest
import torch
from experiments.bench.training import Plain, Recorded, recorded_run, sizes
from experiments.bench.workloads import TINY, sample_losses
from tests.support.oracles import assert_same

import backstory
from backstory.store import RunStore

RANDOM = {"projection": "random", "rank": 2}


@pytest.mark.parametrize("name", ["A", "B"])
def test_recording_does_not_change_the_training(name: str, tmp_path: Path) -> None:
    plain, recorded = Plain(TINY[name]), Recorded(TINY[name], tmp_path / "run", RANDOM)
    for p in [*plain.model.parameters(), *recorded.model.parameters()]:
        p.data.mul_(5)  # gradients long enough to be clipped
    plain.advance(4)
    recorded.advance(3)
    recorded.advance(1)
    recorded.close()
    recorded.close()  # once is enough
    x, y = plain.data
    with torch.no_grad():  # losses, for AdamW takes a whole step on a gradient that is 0 but for rounding
        actual, expected = (sample_losses(m(x), y) for m in (recorded.model, plain.model))
    terms = 4 * 2 * (8 + 32 + 11 + 4 * 5)  # 4 steps, there and back: widths, classes, a batch's tokens
    assert_same(actual, expected, 4 * terms)  # each step works on what the others left, with weights of 5
    assert backstory.open(tmp_path / "run").n_steps == 4


@pytest.mark.parametrize(("curvature", "rows"), [("empirical", 1), ("empirical/2", 2), ("sampled:1/2", 3)])
def test_sizes_count_rows_and_files(curvature: str, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run, _ = recorded_run(TINY["B"], path, {**RANDOM, "curvature": curvature}, 3)
    actual = sizes(path)
    assert actual["occurrences"] == run.n_occurrences == 12
    assert actual["rows"] == rows
    assert actual["dims"] == run.width
    whole = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    assert actual["bytes_per_occurrence"] * 12 + actual["other_bytes"] == pytest.approx(whole)
    assert actual["bytes_per_occurrence"] > 2 * rows * actual["dims"]
    assert actual["settings"] == f"random, rank 2, {curvature}, float16"


def test_the_recording_ends_where_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Recorded, *_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Recorded, "step", broken)
    with pytest.raises(RuntimeError, match="no"):
        recorded_run(TINY["A"], tmp_path / "run", RANDOM, 2)
    with RunStore.open(tmp_path / "run", write=True) as store:  # its lock is free again
        assert store.n_steps() == 0
