"""Pages of measured tables: each says where its figures come from, and its JSON has the tables that it shows."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
from experiments.__main__ import app
from experiments.pages import PROVENANCE, RESULTS, provenance, read_tables, tables_json, write_page

PAGES = sorted(RESULTS.glob("*.md"))
NAMES = [page.stem for page in PAGES]
TEXT = "# Title\n\n| a | b |\n|---|---|\n| 1 | x \\| y |\n\nWords | with a bar.\n\n## `Part`\n\n| c |\n|:--|\n| 2 |\n| -3 |\n"


def test_tables_of_a_page() -> None:
    assert read_tables(TEXT) == [
        {"section": "Title", "columns": ["a", "b"], "rows": [["1", "x | y"]]},
        {"section": "`Part`", "columns": ["c"], "rows": [["2"], ["-3"]]},
    ]


def test_a_table_in_a_block_of_code_is_no_table() -> None:
    assert read_tables("```\n| a |\n|---|\n| 1 |\n```\n") == []


def test_a_page_is_written_with_its_json(tmp_path: Path) -> None:
    write_page(tmp_path / "page.md", TEXT)
    assert (tmp_path / "page.md").read_text() == TEXT
    assert json.loads((tmp_path / "page.json").read_text())["tables"] == read_tables(TEXT)


def test_provenance_is_of_this_machine_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    (table,) = read_tables(provenance(["make bench"]))
    assert tuple(table["columns"]) == PROVENANCE
    (command, date, commit, machine) = table["rows"][0]
    assert command == "`make bench`"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert re.fullmatch(r"[0-9a-f]{7,}|unknown", commit)
    assert f"{os.cpu_count()} cores" in machine

    def refuse(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert read_tables(provenance(["make bench"]))[0]["rows"][0][2] == "unknown"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_says_where_its_figures_come_from(page: Path) -> None:
    first = read_tables(page.read_text())[0]
    assert tuple(first["columns"]) == PROVENANCE, f"{page.name} does not begin with {', '.join(PROVENANCE)}"
    assert first["rows"]
    for _, date, commit, machine in first["rows"]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert re.fullmatch(r"[0-9a-f]{7}(, [0-9a-f]{7})*", commit)
        assert "cores" in machine


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_commands_that_exist(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for command in (row[0] for row in read_tables(page.read_text())[0]["rows"]):
        name = re.match(r"`python -m experiments ([\w-]+)", command)
        assert (name and name[1] in known) or command.startswith("`backstory demo "), command


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_json_of_a_page_is_that_of_its_tables(page: Path) -> None:
    expected, file = tables_json(page.read_text()), page.with_suffix(".json")
    if os.environ.get("UPDATE_DOCS"):
        file.write_text(expected)
    assert file.read_text() == expected, f"{file.name} is out of date: run the tests once with UPDATE_DOCS=1"


def test_there_are_pages() -> None:
    assert {"benchmarks", "dynamics", "fidelity", "sources", "studies"} <= set(NAMES)
