"""`backstory compress` as a person types it."""

import json
from pathlib import Path

import pytest
from tests.run.test_compress import recorded
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.errors import StoreError


def call(*args: str | int | Path) -> str:
    found = CliRunner().invoke(app, ["compress", *map(str, args)], env={"COLUMNS": "160"})
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_it_says_what_became_of_the_run(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run")
    said = call(tmp_path / "run", tmp_path / "small", "--rank", 3, "--windows", 2)
    assert "6 rows of curvature in 2 windows hold" in said
    assert "MB became" in said
    assert backstory.open(tmp_path / "small").config["compressed"]["rank"] == 3


def test_json_and_no_limit(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run")
    told = json.loads(call(tmp_path / "run", tmp_path / "small", "--rank", 0, "--json").strip().splitlines()[-1])
    assert told["path"] == str(tmp_path / "small")
    assert told["energy"] == pytest.approx(1.0, abs=1e-9)
    assert told["bytes_after"] > 0
    with pytest.raises(StoreError, match="there already"):
        call(tmp_path / "run", tmp_path / "small")
