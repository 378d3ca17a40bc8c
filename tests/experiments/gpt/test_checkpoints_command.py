"""`python -m experiments checkpoints` as a person types it, on made-up text."""

import json
from collections.abc import Iterator

import pytest
from experiments.__main__ import app
from rich.console import Console
from tests.experiments.gpt.test_setups import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import output
from experiments.gpt import setups as gpt_setups

COMMAND = ["checkpoints", "--seeds", "0", "--removals", "4", "--numbers", "2", "--rank", "3"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(gpt_setups.SETUPS, "finetune", TINY)
    monkeypatch.setattr(output, "out", Console(width=200))
    yield from without_network()


def test_table_and_json_say_the_same() -> None:
    printed = CliRunner().invoke(app, COMMAND, catch_exceptions=False).stdout
    assert "the checkpoint before the step" in printed
    assert "the recorded run" in printed
    found = json.loads(CliRunner().invoke(app, [*COMMAND, "--json"], catch_exceptions=False).stdout.splitlines()[-1])
    assert len(found["rows"]) == 4
    assert f"{found['rows'][1]['mean']:.3f}" in printed


def test_numbers_are_numbers_or_all() -> None:
    found = CliRunner().invoke(app, ["checkpoints", "--numbers", "5,some"])
    assert found.exit_code == 2
    assert "5,20,all" in found.output
