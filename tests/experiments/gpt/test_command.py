"""`python -m experiments gpt` and `projection` as a person types them, on made-up text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiments.__main__ import app
from experiments.gpt.command import as_markdown
from rich.console import Console
from tests.experiments.gpt.test_setups import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import output
from experiments.gpt import setups as gpt_setups

GPT = ["gpt", "--seeds", "0", "--removals", "4", "--methods", "paper,default,gradient-dot"]
CHECKPOINTS = ["checkpoints", "--seeds", "0", "--removals", "4", "--numbers", "2", "--rank", "3"]
PROJECTION = ["projection", "--mode", "scratch", "--seeds", "0", "--removals", "4", "--ranks", "2,4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for mode in ("finetune", "scratch"):
        monkeypatch.setitem(gpt_setups.SETUPS, mode, TINY)
    monkeypatch.setattr(output, "out", Console(width=250))  # so that no cell is wrapped
    yield from without_network()


def call(*args: str) -> str:
    actual = CliRunner().invoke(app, [*args], catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    return actual.stdout


def test_json_has_rows_and_ceiling(tmp_path: Path) -> None:
    written = tmp_path / "gpt.md"
    actual = json.loads(call(*GPT, "--json", "--markdown", str(written)).strip().splitlines()[-1])
    assert f"| `paper` | {actual['rows'][0]['optimizer_model']} |" in written.read_text(encoding="utf-8")
    assert [row["method"] for row in actual["rows"]] == ["paper", "default", "gradient-dot"]
    assert [row["default"] for row in actual["rows"]] == [False, True, False]
    assert actual["rows"][0]["recording_ratio"] > 0
    assert actual["rows"][2]["recording_ratio"] is None
    assert {"mean", "seeds", "interval", "thirds"} == actual["ceiling"].keys()
    ranks = actual["rows"][1]["against_exact"]
    assert f"| `default` | {ranks['all']:.2f} | {ranks['early']:.2f} / " in written.read_text(encoding="utf-8")
    assert actual["removals"] == 4


def test_the_same_command_twice_prints_the_same_table() -> None:
    (once, cost), (again, _) = (call(*GPT).split("Cost,") for _ in range(2))
    assert once == again
    assert re.search(r"exact unrolling \(ceiling\).*│ adamw .*│ -?\d\.\d+ \[-?\d\.\d+, -?\d\.\d+\]", once)
    assert re.search(r"default \(what record does by itself\) │ [-+]\d\.\d+ \[[-+]", once)
    assert re.search(r"gradient-dot\s+│\s+–\s+│\s+–\s+│\s+\d", cost)
    assert re.search(r"paper\s+│\s+\d+\.\d\s+│\s+[\d,]+\s+│\s+\d", cost)


def test_projection_as_table_and_json() -> None:
    assert re.search(r"logra\s+│\s+4×4\s+│\s+16\s+│\s+[\d,]+\s+│\s+1\.000", call(*PROJECTION))
    actual = json.loads(call(*PROJECTION, "--json").strip().splitlines()[-1])
    assert [row["rank"] for row in actual["rows"]] == [2, 4, 2, 4]


def test_ranks_are_numbers_with_commas() -> None:
    actual = CliRunner().invoke(app, ["projection", "--ranks", "many"])
    assert actual.exit_code == 2
    assert "4,8,16" in actual.output


NONE = {"early": None, "middle": None, "late": None}
PAPER: dict[str, Any] = {
    "method": "paper", "optimizer_model": "sgd proxy, literal", "dims": 82416, "mean": 0.25, "seeds": [0.2, 0.3],
    "against_paper": None, "recording_ratio": None, "bytes_per_occurrence": None, "seconds": 1.26, "default": False,
    "against_exact": None, "size_against_exact": None, "thirds": NONE,
}  # fmt: skip
OURS: dict[str, Any] = {
    **PAPER, "method": "default", "optimizer_model": "adamw, implicit", "dims": 3056, "mean": 0.75, "seeds": [0.7, 0.8],
    "against_paper": {"mean": 0.5, "lower": 0.25, "upper": 0.625}, "recording_ratio": 1.25, "bytes_per_occurrence": 54600.0,
    "default": True, "against_exact": {"early": 0.111, "middle": 0.222, "late": 0.333, "all": 0.25},
    "size_against_exact": {"early": None, "middle": 1.5, "late": 22.0, "all": 3.0},
    "thirds": {"early": None, "middle": {"mean": 0.5, "interval": {"lower": -0.25, "upper": 0.75}}, "late": None},
}  # fmt: skip
FOUND = {
    "seeds": [0, 3],
    "ceiling": {"mean": 0.9876, "seeds": [0.98, 0.99], "thirds": NONE},
    "rows": [PAPER, OURS],
    "contrasts": [{"method": "a", "against": "b", "mean": 0.5, "lower": 0.25, "upper": 0.75}],
    "failed": ["trak: why"],
}


def test_every_figure_stands_in_its_column() -> None:
    lines = as_markdown(FOUND).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == 10
    assert "seeds 0, 3" in lines[0]
    assert lines[2] == "| exact unrolling: **ceiling** | – | – | 0.988 | 0.98 0.99 | – | – | – | – |"
    assert lines[3] == "| `paper` | sgd proxy, literal | 82,416 | 0.250 | 0.20 0.30 | – | – | – | 1.3 |"
    assert lines[4] == (
        "| `default` (**the default**) | adamw, implicit | 3,056 | 0.750 | 0.70 0.80 | +0.500 [+0.250, +0.625] | 1.2 × | 55 kB | 1.3 |"
    )
    assert "| `a` − `b` | +0.500 [+0.250, +0.750] |" in lines
    assert "| `default` | 0.25 | 0.11 / 0.22 / 0.33 | – / 1.50 / 22.00 |" in lines
    assert "| `default` | – | 0.500 [-0.250, 0.750] | – |" in lines
    assert "| exact unrolling | – | – | – |" in lines
    assert sum(line.startswith("| `paper` |") for line in lines) == 2, "it has no scores of occurrences here"
    assert lines[-1] == "Left out: trak: why."


def test_nothing_is_left_out_without_a_reason() -> None:
    plain = as_markdown({**FOUND, "failed": [], "contrasts": []})
    assert "Left out" not in plain
    assert "difference" not in plain


def test_checkpoints_as_table_and_json() -> None:
    printed = CliRunner().invoke(app, CHECKPOINTS, catch_exceptions=False).stdout
    assert "the checkpoint before the step" in printed
    assert "the recorded run" in printed
    actual = json.loads(
        CliRunner().invoke(app, [*CHECKPOINTS, "--json"], catch_exceptions=False).stdout.splitlines()[-1]
    )
    assert len(actual["rows"]) == 4
    assert f"{actual['rows'][1]['mean']:.3f}" in printed


def test_numbers_are_numbers_or_all() -> None:
    actual = CliRunner().invoke(app, ["checkpoints", "--numbers", "5,some"])
    assert actual.exit_code == 2
    assert "5,20,all" in actual.output
