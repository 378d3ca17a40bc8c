"""Printing: a PDF where Chromium is, and nothing left behind where it fails."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from tests.web.browsing import missing

from backstory.errors import StoreError, UnsupportedError
from backstory.web import printing


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that is ours alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def in_place_of_chromium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    file = tmp_path / "false-chromium"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(printing, "BROWSERS", (str(file),))


def ended(process: int) -> bool:
    """Whether a process is gone, or only waits for the system to take note of its end."""
    state = Path(f"/proc/{process}/stat")
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def soon_ended(process: int) -> bool:
    """The same; a process that was ended needs a moment to go."""
    for _ in range(600):
        if ended(process):
            return True
        time.sleep(0.05)
    return False


def test_a_page_is_printed_where_chromium_is(tmp_path: Path, temporary: Path) -> None:
    if not any(map(shutil.which, printing.BROWSERS)):
        missing("no Chromium on the path: install the package `chromium`")
    (tmp_path / "page.html").write_text("<!doctype html><h1>A page</h1>")
    printing.pdf(tmp_path / "page.html", tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-")
    assert list(temporary.glob("backstory-print-*")) == []


def test_without_chromium_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(printing, "BROWSERS", ("no-such-browser",))
    with pytest.raises(UnsupportedError, match=r"Install Chromium or Chrome\. Open the page"):
        printing.pdf(tmp_path / "page.html", tmp_path / "page.pdf")


def test_a_browser_that_writes_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    in_place_of_chromium(tmp_path, monkeypatch, "echo no display >&2; exit 3")
    (tmp_path / "page.pdf").write_text("an old one")
    with pytest.raises(StoreError, match=r"false-chromium wrote no PDF \(no display\)"):
        printing.pdf(tmp_path / "page.html", tmp_path / "page.pdf")
    assert list(temporary.iterdir()) == []


def test_a_browser_that_does_not_end_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path
) -> None:
    own, child = tmp_path / "own", tmp_path / "child"
    half = 'for x in "$@"; do case $x in --print-to-pdf=*) echo half > "${x#--print-to-pdf=}";; esac; done'
    in_place_of_chromium(tmp_path, monkeypatch, f"echo $$ > {own}; sleep 600 & echo $! > {child}; {half}; wait")
    with pytest.raises(StoreError, match=r"printed for 2 s and was ended; expected a PDF by then\. Open the page"):
        printing.pdf(tmp_path / "page.html", tmp_path / "page.pdf", seconds=2)
    assert all(soon_ended(int(x.read_text())) for x in (own, child))
    assert not (tmp_path / "page.pdf").exists()
    assert list(temporary.iterdir()) == []
