"""A sweep's file; that it resumes a sweep is checked in test_unroll.py."""

from pathlib import Path

import torch

from backstory.exact.progress_file import ProgressFile
from backstory.replay.update import Slots

BASE = torch.zeros(1, dtype=torch.float64)


def test_what_is_saved_comes_back_in_order(tmp_path: Path) -> None:
    x = Slots(*(tuple(torch.full((1, 2), 10.0 * k + i) for i in range(12)) for k in range(3)))
    ProgressFile(tmp_path, "reverse", ("a", "b"), BASE, [0, 3]).save(3, x, torch.ones(1, 4))
    saved = ProgressFile(tmp_path, "reverse", ("a", "b"), BASE, [0, 3]).load()
    assert saved is not None
    step, found, scores = saved
    assert step == 3
    assert scores.tolist() == [[1.0] * 4]
    for part, expected in zip(found, x, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(part, expected, strict=True))


def test_another_sweep_has_another_file(tmp_path: Path) -> None:
    x = Slots((BASE,), (BASE,), (BASE,))
    ProgressFile(tmp_path, "reverse", ("a", "b"), BASE, [0]).save(0, x, BASE)
    assert ProgressFile(tmp_path, "reverse", ("a", "c"), BASE, [0]).load() is None
    assert ProgressFile(tmp_path, "sgd", ("a", "b"), BASE, [0]).load() is None
    assert ProgressFile(None, "reverse", ("a", "b"), BASE, [0]).load() is None
