"""`backstory report` as a person types it."""

import json
from pathlib import Path

import pytest
from tests.cli.hostile import Hostile
from typer.testing import CliRunner

from backstory.cli.app import app
from backstory.errors import UsageError


def call(*args: str | Path) -> str:
    found = CliRunner().invoke(app, ["report", *map(str, args)], env={"COLUMNS": "160"})
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_a_file_is_written_and_said_to_contain_training_data(digits_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    said = call(digits_run, "-o", out, "--queries", "few", "--trust-recipe", "--json")
    assert json.loads(said.strip().splitlines()[-1]) == {"report": str(out)}
    page = out.read_text(encoding="utf-8")
    assert "This report contains training data." in page
    assert "For the query set few." in page
    assert "it contains training data" in call(digits_run, "-o", out, "--trust-recipe")


def test_what_would_fail_after_the_work_fails_before_it(digits_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-file"):
        call(digits_run, "-o", tmp_path / "no-such-file" / "r.html", "--trust-recipe")


def test_a_recipe_that_nobody_trusts_is_not_imported(hostile: Hostile, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass --trust-recipe"):
        call(hostile.mine, "-o", tmp_path / "r.html")


def test_a_missing_package_is_said(digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'backstory\[web\]'"):
        call(digits_run, "-o", tmp_path / "r.html", "--trust-recipe")
