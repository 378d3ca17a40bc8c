"""`backstory recipe check` as a person types it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backstory.cli.app import app
from backstory.demo.digits import RECIPE


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["recipe", "check", *(str(a) for a in args)], env={"COLUMNS": "80"})


def test_a_recipe_is_checked_against_its_run(digits_run: Path) -> None:
    printed = call(RECIPE, "--run", digits_run)
    assert printed.exit_code == 0, printed.output
    assert "passed  the first steps are those of the run" in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80
    actual = json.loads(call(RECIPE, "--run", digits_run, "--steps", "2", "--json").stdout)
    assert actual["passed"] is True
    assert "compared at 2 steps" in actual["lines"][-1]["detail"]


FILE = """
import torch, backstory

def recipe():
    model = torch.nn.Linear(2, 1)
    return backstory.Recipe(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, b: m(b).square().mean(),
        batches=[([0, 1], torch.ones(2, 2))],
    )
"""


def test_what_fails_is_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)  # put back afterwards, with what the command adds
    printed = call(f"{tmp_path / 'mine.py'}:recipe")
    assert printed.exit_code == 2
    assert "FAILED  one finite loss per sample: step 0 has losses of shape ()" in printed.stdout
    assert call("nothing").exit_code != 0
