"""From disk to mathematics: whole steps, last first, the same whatever the size of a chunk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import mlp, stored, train
from torch import Tensor

from backstory.run import sweep
from backstory.run.sweep import backward, cut, slices
from backstory.store import RunStore


def recorded(path: Path) -> RunStore:
    model = mlp()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.3}, {"params": [first], "weight_decay": 0.1}], lr=0.1)
    train(path, model, optimizer, 7, max_norm=0.1)
    return RunStore.open(path)


@pytest.mark.parametrize("chunk_bytes", [1, 26 * 8 * 7, 1 << 20])
def test_steps_come_whole_and_last_first(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, actual = recorded(tmp_path / "run"), stored(tmp_path / "run")
    monkeypatch.setattr(sweep, "CHUNK_BYTES", chunk_bytes)
    seen: list[int] = []
    for chunk in backward(store, 6, dtype=torch.float64):
        for i, step in reversed(list(enumerate(chunk.steps))):
            t = chunk.first_step + i
            rows = slice(3 * t, 3 * t + 3)
            assert torch.equal(step.G, actual.rows[rows])
            assert torch.equal(step.w, actual.weight[rows])
            assert step.dot_g is not None
            assert torch.equal(step.dot_g, actual.gdot[rows])
            assert (step.clip, step.norm) == (actual.table.clip[t], actual.table.norm[t])
            seen.append(t)
        assert chunk.row_start == 3 * chunk.first_step
    assert seen == [5, 4, 3, 2, 1, 0]


def test_coefficients_are_numbers_where_groups_agree_and_vectors_where_not(tmp_path: Path) -> None:
    (chunk,) = backward(recorded(tmp_path / "run"), 7, dtype=torch.float64)
    k: Any = chunk.steps[0].coefficients
    assert (k.momentum, k.a, k.n, k.tau, k.decay) == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert isinstance(k.rate, Tensor)
    assert k.rate.tolist() == [0.1] * 12 + [0.3] * 14  # 0.weight is alone in the second group
    assert k.l2.tolist() == [0.1] * 12 + [0.0] * 14


def test_a_block_sees_its_own_coordinates(tmp_path: Path) -> None:
    store = recorded(tmp_path / "run")
    assert slices(store) == [slice(0, 12), slice(12, 16), slice(16, 24), slice(24, 26)]
    (chunk,) = backward(store, 7, dtype=torch.float64)
    part = cut(chunk.steps[0], slice(10, 14))
    assert torch.equal(part.G, chunk.steps[0].G[:, 10:14])
    assert isinstance(part.coefficients.rate, Tensor)
    assert part.coefficients.rate.tolist() == [0.1, 0.1, 0.3, 0.3]
    assert part.dot_g is chunk.steps[0].dot_g


def test_the_run_can_be_read_while_it_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read ahead in a thread: two threads cannot read one table of Lance, so it has tables of its own."""
    model = mlp()
    train(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), 60)
    store = RunStore.open(tmp_path / "run")
    monkeypatch.setattr(sweep, "CHUNK_BYTES", 1)
    for chunk in backward(store, 60, dtype=torch.float32):
        for _ in range(4):
            assert len(store.read(chunk.row_start, chunk.row_start + 1).step) == 1
