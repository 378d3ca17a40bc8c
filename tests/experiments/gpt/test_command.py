"""`python -m experiments gpt` and `projection` as a person types them, on made-up text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.__main__ import app
from rich.console import Console
from tests.experiments.gpt.test_setups import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import output
from experiments.gpt import setups as gpt_setups

GPT = ["gpt", "--seeds", "0", "--removals", "4", "--methods", "paper,default,gradient-dot"]
PROJECTION = ["projection", "--mode", "scratch", "--seeds", "0", "--removals", "4", "--ranks", "2,4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for mode in ("finetune", "scratch"):
        monkeypatch.setitem(gpt_setups.SETUPS, mode, TINY)
    monkeypatch.setattr(output, "out", Console(width=250))  # so that no cell is wrapped
    yield from without_network()


def call(*args: str) -> str:
    found = CliRunner().invoke(app, [*args], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_json_has_rows_and_ceiling(tmp_path: Path) -> None:
    written = tmp_path / "gpt.md"
    found = json.loads(call(*GPT, "--json", "--markdown", str(written)).strip().splitlines()[-1])
    assert f"| `paper` | {found['rows'][0]['optimizer_model']} |" in written.read_text(encoding="utf-8")
    assert [row["method"] for row in found["rows"]] == ["paper", "default", "gradient-dot"]
    assert [row["default"] for row in found["rows"]] == [False, True, False]
    assert found["rows"][0]["recording_ratio"] > 0
    assert found["rows"][2]["recording_ratio"] is None
    assert {"mean", "seeds", "interval"} == found["ceiling"].keys()
    assert found["removals"] == 4


def test_the_same_command_twice_prints_the_same_table() -> None:
    (once, cost), (again, _) = (call(*GPT).split("Cost,") for _ in range(2))
    assert once == again
    assert re.search(r"exact unrolling \(ceiling\).*│ adamw .*│ -?\d\.\d+ \[-?\d\.\d+, -?\d\.\d+\]", once)
    assert re.search(r"default \(what record does by itself\) │ [-+]\d\.\d+ \[[-+]", once)
    assert re.search(r"gradient-dot\s+│ –\s+│ –\s+│ \d", cost)
    assert re.search(r"paper\s+│ \d+\.\d\s+│ [\d,]+\s+│ \d", cost)


def test_projection_as_table_and_json() -> None:
    assert re.search(r"logra\s+│ 4×4\s+│ 16\s+│ [\d,]+\s+│ 1\.000", call(*PROJECTION))
    found = json.loads(call(*PROJECTION, "--json").strip().splitlines()[-1])
    assert [row["rank"] for row in found["rows"]] == [2, 4, 2, 4]


def test_ranks_are_numbers_with_commas() -> None:
    found = CliRunner().invoke(app, ["projection", "--ranks", "many"])
    assert found.exit_code == 2
    assert "16,32" in found.output
