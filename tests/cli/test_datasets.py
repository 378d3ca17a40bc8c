"""`backstory data` as a person types it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from backstory.cli import show
from backstory.cli.datasets import app
from backstory.demo.data import DataError, catalogue
from backstory.demo.data.catalogue import Entry
from backstory.demo.data.fetch import keep
from backstory.errors import UsageError


@pytest.fixture(autouse=True)
def _made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and data sets that fetching makes of nothing."""
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    monkeypatch.setattr(show, "out", Console(width=200))
    real = catalogue.catalogue()

    def get(entry: Entry) -> None:
        if entry.name == "cifar-10":
            raise DataError("the registry is away")
        for name in entry.files:
            keep(tmp_path / entry.folder / name, b"")

    def fake() -> dict[str, Entry]:
        return {name: replace(entry, get=partial(get, entry)) for name, entry in real.items()}

    monkeypatch.setattr(catalogue, "catalogue", fake)


def call(*args: str) -> str:
    found = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def last(text: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(text.strip().splitlines()[-1])
    return found


def test_list_shows_every_set_and_its_licence(tmp_path: Path) -> None:
    shown = call("list")
    for name, entry in catalogue.catalogue().items():
        line = next(line for line in shown.splitlines() if f" {name} " in line)
        assert entry.licence in line
        assert " no " in line
    assert str(tmp_path) in shown


def test_list_as_json_says_what_is_cached() -> None:
    call("fetch", "mnist")
    rows = {row["name"]: row for row in last(call("list", "--json"))["data"]}
    assert rows["mnist"]["cached"] is True
    assert rows["fashion-mnist"]["cached"] is False
    assert rows.keys() == catalogue.catalogue().keys()


def test_fetch_says_where_and_that_it_was_checked(tmp_path: Path) -> None:
    shown = call("fetch", "mnist", "corpus/law")
    assert f"mnist: {tmp_path / 'mnist'} (hash checked" in shown
    assert f"corpus/law: {tmp_path / 'corpus' / 'law.jsonl'} (hash checked" in shown


def test_fetch_takes_groups_and_gives_json() -> None:
    found = last(call("fetch", "corpus", "--json"))["fetched"]
    assert len(found) == 8
    assert all(row["checked"] and row["cached"] for row in found)


def test_errors_are_plain() -> None:
    with pytest.raises(UsageError, match="found the data set 'imagenet'"):
        call("fetch", "imagenet")
    with pytest.raises(DataError, match="the registry is away"):
        call("fetch", "all")
    assert CliRunner().invoke(app, ["fetch"]).exit_code == 2
