"""The small studies as a person types them."""

import json
from pathlib import Path

import pytest
from experiments.__main__ import app
from experiments.cli import floats_of, numbers_of
from rich.console import Console
from typer.testing import CliRunner

from backstory.cli import output
from backstory.errors import UsageError

COMMANDS = {
    "limit": ["--models", "linear", "--steps", "5,50", "--seeds", "0-1"],
    "kinks": ["--model", "tiny", "--seeds", "0", "--removals", "2", "--images", "32", "--epochs", "1", "--factors", "1,0.1"],
    "bound": ["--hidden", "2", "--images", "32", "--epochs", "1", "--removals", "2", "--C", "1"],
    "duplicates": ["--model", "tiny", "--seeds", "0", "--copies", "3", "--images", "64", "--epochs", "1", "--rank", "4"],
    "ablation": [
        "--model", "tiny", "--seeds", "0", "--removals", "3", "--images", "48", "--epochs", "1", "--ranks", "2",
        "--projections", "learned,random", "--curvatures", "empirical", "--warmup", "2,epoch",
    ],
}  # fmt: skip
EXPECTED = {
    "limit": "standard error",
    "kinks": "of ReLU's gap is not there",
    "bound": "The theorem held",
    "duplicates": "one number",
    "ablation": "bytes",
}


def call(*args: str) -> str:
    actual = CliRunner().invoke(app, [*args], catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    return actual.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_table_page_and_json(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "out", Console(width=200))
    page = tmp_path / "page.html"
    assert EXPECTED[name] in call(name, *COMMANDS[name], "--plot", str(page))
    assert "Plotly" in page.read_text(encoding="utf-8")
    actual = json.loads(call(name, *COMMANDS[name], "--json").strip().splitlines()[-1])
    rows = actual["curves"] if name == "limit" else actual["rows"]
    assert len(rows) == {"limit": 1, "kinks": 4, "bound": 2, "duplicates": 5, "ablation": 3}[name]


def test_lists_are_numbers_with_commas() -> None:
    assert numbers_of("4, 8") == [4, 8]
    assert floats_of("1,0.1") == [1.0, 0.1]
    actual = CliRunner().invoke(app, ["ablation", "--ranks", "many"])
    assert actual.exit_code == 2
    assert "4,8,16" in actual.output
    actual = CliRunner().invoke(app, ["kinks", "--setup", "none"])
    assert actual.exit_code == 2
    assert "paper or smooth" in actual.output


@pytest.mark.parametrize(
    "command",
    [["limit", "--plot"], ["domains", "--plot"], ["planted", "--kind", "labels", "--plot"], ["fidelity", "--scatter"]],
)
def test_a_page_that_cannot_be_written_is_refused_before_the_work(command: list[str], tmp_path: Path) -> None:
    actual = CliRunner().invoke(app, [*command, str(tmp_path / "no-such-folder" / "page.html")])
    assert isinstance(actual.exception, UsageError)
    assert "there is no folder" in str(actual.exception)
