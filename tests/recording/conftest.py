"""Recording without waiting for the disk: these tests kill no power supply. `test_kill.py` runs with every flush."""

from pathlib import Path

import pytest

from backstory.recording import adam
from backstory.store import files, tables


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(path: Path) -> None:
        """As if flushed."""

    for module in (files, tables):
        monkeypatch.setattr(module, "fsync", nothing)


@pytest.fixture
def scales_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's second moment is read after every step, however many went before, and never known ahead: formulas then hold to rounding."""
    monkeypatch.setattr(adam, "KNOWN", 10**6)
