"""Recording without waiting for the disk, and compiled graphs that do not outlive their test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backstory.store import files, tables


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(path: Path) -> None:
        """As if flushed."""

    for module in (files, tables):
        monkeypatch.setattr(module, "fsync", nothing)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
