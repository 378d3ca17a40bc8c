"""The demo ends with the command that opens the page on its run; the fine-tuning demo writes both timelines; data sets by name."""

import io
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.demo.test_stories_run import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import demo, output
from backstory.cli.app import app
from backstory.demo import stories
from backstory.demo.data import DataError, catalogue
from backstory.demo.data.catalogue import Entry
from backstory.demo.data.fetch import keep
from backstory.demo.stories_run import StoriesSetup
from backstory.errors import UsageError


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
    demo._print_paths(SimpleNamespace(seconds={"train": 1.0}, run="a-long-folder-for-demos/run"), Path("report.html"))
    last = file.getvalue().strip().splitlines()[-1]
    assert last.endswith(f" {shown} serve a-long-folder-for-demos/run")


def test_the_fine_tuning_demo_shows_both_timelines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = stories.stories
    monkeypatch.setattr(stories, "stories", lambda out, say: small(out, StoriesSetup(**TINY), say=say))
    monkeypatch.setattr(output, "out", Console(width=200))
    for _ in without_network():
        done = CliRunner().invoke(app, ["demo", "stories", "--out", str(tmp_path), "--json"], catch_exceptions=False)
    actual = json.loads(done.stdout.splitlines()[-1])
    assert [one["setup"]["passes"] for one in actual["runs"]] == [1, 3]
    assert f"{actual['runs'][0]['before']:.2f}" in done.stdout
    page = Path(actual["report"]).read_text()
    assert page.count('class="plotly-graph-div"') == 2
    assert "each used 3 times" in page


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and data sets that fetching makes of nothing."""
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    monkeypatch.setattr(output, "out", Console(width=200))
    real = catalogue.catalogue()

    def get(entry: Entry) -> None:
        if entry.name == "corpus/books":
            raise DataError("the registry is away")
        for name in entry.files:
            keep(tmp_path / entry.folder / name, b"")

    def fake() -> dict[str, Entry]:
        return {name: replace(entry, get=partial(get, entry)) for name, entry in real.items()}

    monkeypatch.setattr(catalogue, "catalogue", fake)


def call(*args: str) -> str:
    actual = CliRunner().invoke(app, ["data", *args], catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    return actual.stdout


def last(text: str) -> dict[str, list[dict[str, object]]]:
    actual: dict[str, list[dict[str, object]]] = json.loads(text.strip().splitlines()[-1])
    return actual


@pytest.mark.usefixtures("made_up")
def test_list_shows_every_set_and_its_licence(tmp_path: Path) -> None:
    shown = call("list")
    for name, entry in catalogue.catalogue().items():
        line = next(line for line in shown.splitlines() if f" {name} " in line)
        assert entry.licence in line
        assert " no " in line
    assert str(tmp_path) in shown


@pytest.mark.usefixtures("made_up")
def test_list_as_json_says_what_is_cached() -> None:
    call("fetch", "stories15m")
    rows = {row["name"]: row for row in last(call("list", "--json"))["data"]}
    assert rows["stories15m"]["cached"] is True
    assert rows["mnist-5k"]["cached"] is False
    assert rows.keys() == catalogue.catalogue().keys()


@pytest.mark.usefixtures("made_up")
def test_fetch_says_where_and_that_it_was_checked(tmp_path: Path) -> None:
    shown = call("fetch", "stories15m", "corpus/law")
    assert f"stories15m: {tmp_path / 'stories15m'} (hash checked" in shown
    assert f"corpus/law: {tmp_path / 'corpus' / 'law.jsonl'} (hash checked" in shown


@pytest.mark.usefixtures("made_up")
def test_fetch_takes_groups_and_gives_json() -> None:
    actual = last(call("fetch", "corpus/law", "mnist-5k", "--json"))["fetched"]
    assert len(actual) == 2
    assert all(row["checked"] and row["cached"] for row in actual)


@pytest.mark.usefixtures("made_up")
def test_errors_are_plain() -> None:
    with pytest.raises(UsageError, match="found the data set 'imagenet'"):
        call("fetch", "imagenet")
    with pytest.raises(DataError, match="the registry is away"):
        call("fetch", "all")
    assert CliRunner().invoke(app, ["data", "fetch"]).exit_code == 2
