"""The demo ends with the command that opens the page on its run."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from backstory.cli import demo, output


@pytest.mark.parametrize(
    ("program", "shown"),
    [(".venv/bin/backstory", ".venv/bin/backstory"), ("backstory", "backstory"), ("/x/pytest", "backstory")],
)
def test_the_command_that_opens_the_page_is_printed_last(
    monkeypatch: pytest.MonkeyPatch, program: str, shown: str
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(output, "out", Console(file=file, width=40))
    monkeypatch.setattr(sys, "argv", [program, "demo"])
    demo.print_paths("a-long-folder-for-demos/run", Path("report.html"))
    last = file.getvalue().strip().splitlines()[-1]
    assert last == f"Open report.html in a browser, or explore the run:  {shown} serve a-long-folder-for-demos/run"
