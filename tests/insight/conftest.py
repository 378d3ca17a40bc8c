"""Recording without waiting for the disk, and one small run with everything, recorded once for tests that only read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.insight.runs import Small, small

from backstory.store import files, spool, tables


@pytest.fixture(scope="session", autouse=True)
def _no_flush() -> Iterator[None]:
    def nothing(path: Path) -> None:
        """As if flushed."""

    with pytest.MonkeyPatch.context() as patch:
        for module in (files, spool, tables):
            patch.setattr(module, "fsync", nothing)
        yield


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """SGD with a schedule, losses, sources, texts and three checkpoints."""
    return small("sgd", tmp_path_factory.mktemp("runs") / "plain")
