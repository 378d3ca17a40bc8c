"""`python -m experiments bench serve` prints what the bench found."""

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.__main__ import app
from rich.console import Console
from typer.testing import CliRunner

from backstory.cli import output
from experiments.bench import serving

ROW = {"occurrences": 20480, "warm_median_s": 0.0375, "errors": 0, "memory_growth": None}


def test_figures_as_json_and_as_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def found(run: Path | None, **how: Any) -> dict[str, Any]:
        asked.append((run, how))
        return {"rows": [ROW]}

    monkeypatch.setattr(serving, "bench_serve", found)
    monkeypatch.setattr(output, "out", Console(width=300))
    plain = CliRunner().invoke(
        app, ["bench", "serve", str(tmp_path), "--clients", "3", "--json"], catch_exceptions=False
    )
    assert json.loads(plain.stdout) == {"rows": [ROW]}
    assert asked[0][0] == tmp_path
    assert (asked[0][1]["clients"], asked[0][1]["seconds"]) == (3, 60.0)
    table = CliRunner().invoke(app, ["bench", "serve"], catch_exceptions=False)
    assert "20,480" in table.stdout
    assert "0.0375" in table.stdout
    assert asked[1][0] is None
