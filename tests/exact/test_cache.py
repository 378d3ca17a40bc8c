"""Rows and sweeps on disk, found again by what decides them."""

from pathlib import Path

import torch

from backstory.exact.cache import ProgressFile, Rows
from backstory.exact.derivative import State

BASE = torch.tensor([0.1, 0.2], dtype=torch.float64)


def test_a_row_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    row = torch.tensor([1 / 3, -1e-17], dtype=torch.float64)
    Rows(tmp_path, ("a", "b"), BASE).put({3: [1, 2]}, 1.0, None, row)
    actual = Rows(tmp_path, ("a", "b"), BASE).get({3: [1, 2]}, 1.0)
    assert actual is not None
    assert torch.equal(actual, row)


def test_anything_else_is_not_found(tmp_path: Path) -> None:
    rows = Rows(tmp_path, ("a", "b"), BASE)
    rows.put({3: [1]}, 1.0, None, BASE)
    assert rows.get({3: [2]}, 1.0) is None
    assert rows.get({3: [1]}, 0.5) is None
    assert rows.get({3: [1]}, 1.0, 0) is None, "a twin leaves nothing out"
    assert Rows(tmp_path, ("a", "c"), BASE).get({3: [1]}, 1.0) is None
    assert Rows(tmp_path, ("a", "b"), BASE + 1e-16).get({3: [1]}, 1.0) is None


def test_without_a_folder_nothing_is_kept() -> None:
    rows = Rows(None, ("a", "b"), BASE)
    rows.put({3: [1]}, 1.0, None, BASE)
    assert rows.get({3: [1]}, 1.0) is None


BASE = torch.zeros(1, dtype=torch.float64)


def test_what_is_saved_comes_back_in_order(tmp_path: Path) -> None:
    x = State(*(torch.arange(12.0).reshape(1, 12) + 100 * k for k in range(3)))
    ProgressFile(tmp_path / "new", "reverse-a").save(3, x, torch.ones(1, 4))
    saved = ProgressFile(tmp_path / "new", "reverse-a").load()
    assert saved is not None
    step, actual, scores = saved
    assert step == 3
    assert scores.tolist() == [[1.0] * 4]
    assert all(torch.equal(a, b) for a, b in zip(actual, x, strict=True))
    assert ProgressFile(tmp_path / "new", "reverse-b").load() is None


def test_without_a_folder_no_sweep_is_kept() -> None:
    file = ProgressFile(None, "reverse-a")
    file.save(0, State(BASE, BASE, BASE), BASE)
    assert file.load() is None
