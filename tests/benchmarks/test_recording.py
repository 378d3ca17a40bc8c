"""The recording bench really records, and both candidates train."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backstory.benchmarks import recording


def test_compare_times_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, y = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: _Kept(tmp_path))
    found = recording._compare(
        "tiny", lambda: nn.Linear(6, 6), lambda m: F.mse_loss(m(x), y), 4, 2, 3, subspace="random", rank=2
    )
    assert found["ratio"] > 0
    assert found["plain_ms_per_step"] > 0
    import backstory

    assert backstory.open(tmp_path / "run").n_steps == 9  # one warm-up turn and two repeats of three steps


class _Kept:
    """A temporary directory that stays, so that the run can be looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> str:
        return str(self.path)

    def __exit__(self, *_: object) -> None:
        return None


def test_block_is_a_transformer_block() -> None:
    out = recording.Block(24, 4)(torch.zeros(2, 5, 24))
    assert out.shape == (2, 5, 24)
