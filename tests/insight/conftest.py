"""Recording without waiting for the disk, and one small run with everything, recorded once for tests that only read."""

from pathlib import Path

import pytest
from tests.insight.runs import Small, small

from backstory.store import files, tables


def without_flush(patch: pytest.MonkeyPatch) -> None:
    def nothing(path: Path) -> None:
        """As if flushed."""

    for module in (files, tables):
        patch.setattr(module, "fsync", nothing)


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    without_flush(monkeypatch)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """SGD with a schedule, losses, sources, texts and three checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        without_flush(patch)
        return small("sgd", tmp_path_factory.mktemp("runs") / "plain")
