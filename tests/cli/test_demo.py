"""The demo ends with the command that opens the page on its run; the fine-tuning demo writes both timelines."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.demo.test_stories_recipe import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import demo, output
from backstory.cli.app import app
from backstory.demo import stories
from backstory.demo.stories import StoriesSetup


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
    assert last.endswith(f" {shown} serve a-long-folder-for-demos/run")


def test_the_fine_tuning_demo_shows_both_timelines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = stories.stories
    monkeypatch.setattr(stories, "stories", lambda out, progress: small(out, StoriesSetup(**TINY), progress=progress))
    monkeypatch.setattr(output, "out", Console(width=200))
    for _ in without_network():
        done = CliRunner().invoke(app, ["demo", "stories", "--out", str(tmp_path), "--json"], catch_exceptions=False)
    actual = json.loads(done.stdout.splitlines()[-1])
    assert [one["setup"]["passes"] for one in actual["runs"]] == [1, 3]
    assert f"{actual['runs'][0]['before']:.2f}" in done.stdout
    page = Path(actual["report"]).read_text()
    assert page.count('class="plotly-graph-div"') == 2
    assert "each used 3 times" in page
