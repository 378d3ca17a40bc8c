"""Rows on disk; that they resume a job is checked in test_tsloo.py."""

from pathlib import Path

import torch

from backstory.exact.rows import Rows

BASE = torch.tensor([0.1, 0.2], dtype=torch.float64)


def test_a_row_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    row = torch.tensor([1 / 3, -1e-17], dtype=torch.float64)
    Rows(tmp_path, ("a", "b"), BASE).put({3: [1, 2]}, 1.0, row)
    found = Rows(tmp_path, ("a", "b"), BASE).get({3: [1, 2]}, 1.0)
    assert found is not None
    assert torch.equal(found, row)


def test_anything_else_is_not_found(tmp_path: Path) -> None:
    rows = Rows(tmp_path, ("a", "b"), BASE)
    rows.put({3: [1]}, 1.0, BASE)
    assert rows.get({3: [2]}, 1.0) is None
    assert rows.get({3: [1]}, 0.5) is None
    assert Rows(tmp_path, ("a", "c"), BASE).get({3: [1]}, 1.0) is None
    assert Rows(tmp_path, ("a", "b"), BASE + 1e-16).get({3: [1]}, 1.0) is None


def test_without_a_folder_nothing_is_kept() -> None:
    rows = Rows(None, ("a", "b"), BASE)
    rows.put({3: [1]}, 1.0, BASE)
    assert rows.get({3: [1]}, 1.0) is None
