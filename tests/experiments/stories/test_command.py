"""The command writes both timelines, and prints both losses."""

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.__main__ import app
from experiments.stories.study import StoriesSetup
from rich.console import Console
from tests.experiments.stories.test_recipe import TINY, without_network
from typer.testing import CliRunner

from backstory.cli import output
from experiments.stories import study


@pytest.mark.parametrize("more", [["--json"], []], ids=["json", "table"])
def test_both_timelines_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: list[str]) -> None:
    runs: list[study.FineTuning] = []
    small = study.fine_tune

    def fine_tune(out: Path, **options: Any) -> list[study.FineTuning]:
        runs.extend(small(out, StoriesSetup(**TINY), **options))
        return runs

    monkeypatch.setattr(study, "fine_tune", fine_tune)
    monkeypatch.setattr(output, "out", Console(width=200))
    for _ in without_network():
        done = CliRunner().invoke(app, ["stories", "--out", str(tmp_path / "new"), *more], catch_exceptions=False)
    if more:
        actual = json.loads(done.stdout)
        assert [one["setup"]["passes"] for one in actual["runs"]] == [1, 3]
        assert actual["report"] == str(tmp_path / "new" / "report.html")
    else:
        assert all(f"{x:.2f}" in done.stdout for one in runs for x in (one.before, one.after))
    page = (tmp_path / "new" / "report.html").read_text()
    assert page.count('class="plotly-graph-div"') == 2
    assert "each used 3 times" in page
