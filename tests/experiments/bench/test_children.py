"""Work in another process: its values, its memory, and a plain error where it fails."""

import os
import time

import pytest
from experiments.bench.children import in_child, last_line

from backstory.errors import BackstoryError


def kept_bytes(size: int) -> dict[str, int]:
    """What a test's child does: hold so many bytes, and touch them."""
    return {"held": len(bytearray(b"x") * size)}


def sleeps() -> None:
    """What a test's child does that never ends by itself."""
    time.sleep(600)


def test_a_child_reports_its_own_memory(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    small, large = (in_child("test_children:kept_bytes", {"size": n}) for n in (1, 300 << 20))
    assert large["held"] == 300 << 20
    assert large["peak_bytes"] - small["peak_bytes"] > 200 << 20
    assert large["seconds"] > 0


def test_a_failing_child_says_why() -> None:
    with pytest.raises(BackstoryError, match="No module named 'no_such_module'"):
        in_child("no_such_module:f", {})


def test_a_child_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(request.path.parent), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(BackstoryError, match="test_children:sleeps was not done after 0 s"):
        in_child("test_children:sleeps", {}, timeout=0.1)


def test_last_line() -> None:
    assert last_line("a\n  b  \n\n") == "b"
    assert last_line("") == "no message"
