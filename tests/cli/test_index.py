"""`backstory index` as a person types it."""

import json
from pathlib import Path

import pytest
from tests.run.test_index import recorded
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.errors import UsageError


def call(*args: str | int | Path) -> str:
    found = CliRunner().invoke(app, ["index", *map(str, args)], env={"COLUMNS": "160"})
    if found.exception is not None:
        raise found.exception
    return found.stdout


def test_it_says_what_it_finds_and_is_used(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run")
    with pytest.raises(UsageError, match="no embeddings"):
        call(tmp_path / "run")
    run.embed()
    said = call(tmp_path / "run", "--queries", 5)
    assert f"{run.store.n_rows():,} embeddings at step {run.n_steps} are indexed" in said
    assert "highest and" in said
    told = json.loads(call(tmp_path / "run", "--queries", 5, "--recall", 1, "--json").strip().splitlines()[-1])
    assert told["recall_highest"] == told["recall_lowest"] == 1.0
    v = run.store.read(0, 1).rows
    assert v is not None
    assert "found by an approximate index" in str(
        backstory.open(tmp_path / "run").query_gradients(v, keep=3, method="index").notes
    )
