"""Recording without waiting for the disk; nothing is asked of any hub."""

import os
from pathlib import Path

import pytest

from backstory.store import files, tables

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(path: Path) -> None:
        """As if flushed."""

    for module in (files, tables):
        monkeypatch.setattr(module, "fsync", nothing)
