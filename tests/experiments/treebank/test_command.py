"""`python -m experiments treebank` as a person types it, on made-up text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.__main__ import app
from rich.console import Console
from tests.experiments.treebank.test_run import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import output
from experiments.treebank import run as treebank_run

COMMAND = ["treebank", "--sequences", "16", "--epochs", "2", "--copies", "4", "--proofs", "2"]
SMALL = {k: v for k, v in TINY.items() if k not in ("sequences", "epochs")}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    whole = treebank_run.TreebankSetup
    monkeypatch.setattr(treebank_run, "TreebankSetup", lambda **args: whole(**{**SMALL, **args}))
    monkeypatch.setattr(output, "out", Console(width=200))
    yield from without_network()


def test_tables_pages_and_json_say_the_same(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, [*COMMAND, "--out", str(tmp_path / "a")], catch_exceptions=False).stdout
    done = CliRunner().invoke(app, [*COMMAND, "--out", str(tmp_path / "b"), "--json"], catch_exceptions=False)
    actual = json.loads(done.stdout.splitlines()[-1])
    assert "4 copies: the original among 16 sequences" in printed
    assert actual["timeline"]["phases"]["words"] in printed
    assert actual["setup"]["ends"] == [4, 8]
    assert actual["proven"]["originals"] == 2
    assert f"the original was worth more in {actual['proven']['original_was_worth_more']} of" in printed
    assert f"{actual['proven']['originals_truth']:+.3f}" in printed
    for name in ("timeline", "evolution", "copies", "examples"):
        assert (tmp_path / "a" / f"{name}.html").read_text().startswith("<!doctype html>")
    rows = [line for line in printed.splitlines() if "gradient cosine" in line]
    shares = [one["share_first"] for one in actual["copies"] if one["method"] == "gradient cosine"]
    assert [f"{x:.1%}" in row for x, row in zip(shares, rows, strict=True)] == [True, True]


def test_too_many_copies_are_refused(tmp_path: Path) -> None:
    actual = CliRunner().invoke(app, [*COMMAND, "--copies", "17", "--out", str(tmp_path)])
    assert "between 3 and 16" in str(actual.exception)
