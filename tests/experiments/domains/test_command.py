"""`python -m experiments domains` as a person types it, on made-up text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.__main__ import app
from rich.console import Console
from tests.experiments.data.test_passages import without_network
from tests.experiments.data.test_texts import TINY
from typer.testing import CliRunner

from backstory.cli import output
from experiments.data import texts as domains_setups

COMMAND = ["domains", "--seeds", "0", "--methods", "tracin,influence"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(domains_setups.SETUPS, "finetune", TINY)
    monkeypatch.setattr(output, "out", Console(width=220))
    yield from without_network()


def test_tables_json_and_page_say_the_same(tmp_path: Path) -> None:
    page = tmp_path / "domains.html"
    printed = CliRunner().invoke(app, [*COMMAND, "--plot", str(page)], catch_exceptions=False).stdout
    actual = json.loads(CliRunner().invoke(app, [*COMMAND, "--json"], catch_exceptions=False).stdout.splitlines()[-1])
    rows = {row["method"]: row for row in actual["rows"]}
    assert "without half of each source" in printed
    for part in ("whole", "half"):
        assert f"{rows['tracin'][part]['all']['mean']:.3f} [" in printed
        assert f"{rows['tracin'][part]['scale']:.3g}" in printed
    assert f"influence-best ({rows['influence-best']['whole']['chosen']})" in printed
    assert "tracin" in page.read_text(encoding="utf-8")


def test_unknown_modes_and_methods_are_refused() -> None:
    for option, words in (("--mode", "must be one of finetune"), ("--methods", "Choose from recorded")):
        actual = CliRunner().invoke(app, ["domains", option, "some"])
        assert actual.exit_code == 1
        assert words in str(actual.exception)
