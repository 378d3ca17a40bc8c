"""`backstory exact` as a person types it, on a small recorded run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.cli.exact import parse_queries
from backstory.demo.digits import RECIPE


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "run"
    shutil.copytree(digits_run, path)
    return path


def call(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["exact", *(str(a) for a in args)], env={"COLUMNS": "80"})


def test_it_computes_prints_and_stores_what_the_library_gives(run: Path) -> None:
    printed = call(run, "--queries", "test:0,2", "--since", "20", "--top", "2", "--json", "--trust-recipe")
    assert printed.exit_code == 0, printed.output
    actual = json.loads(printed.stdout.strip().splitlines()[-1])
    expected = backstory.open(run).exact(["test:0", "test:2"], RECIPE, since=20)
    assert actual == json.loads(json.dumps(expected.as_dict(top=2)))
    assert len(backstory.open(run).exact_results()) == 2
    table = call(run, "--queries", "test:2", "--since", "20", "--trust-recipe")
    assert "Helped most" in table.stdout
    assert "exact unrolling" in table.stdout
    assert max(map(len, table.stdout.splitlines())) <= 80


def test_other_commands_use_what_is_stored_and_a_method_can_be_chosen(run: Path) -> None:
    assert call(run, "--queries", "few:1", "--trust-recipe").exit_code == 0

    def method(command: str, *args: str) -> Any:
        options = [command, str(run), "--queries", "few:1", "--json", "--trust-recipe", *args]
        printed = CliRunner().invoke(app, options)
        return json.loads(printed.stdout)["method"] if printed.exit_code == 0 else str(printed.exception)

    assert method("query") == method("timeline") == method("harmful") == "exact unrolling"
    assert method("query", "--method", "adjoint") == method("timeline", "--method", "adjoint") == "adjoint"
    assert method("evolution")[-1] == "exact unrolling"
    assert "has no exact result" in " ".join(method("evolution", "--method", "exact").split())
    table = CliRunner().invoke(app, ["query", str(run), "--queries", "few:1", "--trust-recipe"], env={"COLUMNS": "80"})
    assert "(method: exact unrolling)" in " ".join(table.stdout.split())
    assert table.stdout.strip().splitlines()[-1].startswith("+ helped, − hurt. Exact, through the replayed training.")
    shown = CliRunner().invoke(app, ["inspect", str(run)], env={"COLUMNS": "100"}).stdout
    assert "few:1 at step" in " ".join(shown.split())


def test_another_precision_is_another_result(run: Path) -> None:
    assert call(run, "--queries", "test:0", "--since", "25", "--precision", "float64", "--trust-recipe").exit_code == 0
    result = backstory.open(run).exact("test:0", RECIPE, since=25, dtype=torch.float64)
    assert "computed in float64" in result.caveats


def test_what_cannot_be_meant_is_refused_in_a_sentence(run: Path) -> None:
    wrong = call(run, "--queries", "test:0", "--precision", "half")
    assert wrong.exit_code == 2
    assert "must be float32 or float64" in wrong.output.replace("\n", " ")


def test_indices_of_one_set() -> None:
    assert parse_queries("test") == ["test"]
    assert parse_queries("test:3") == ["test:3"]
    assert parse_queries("test:3, 5") == ["test:3", "test:5"]
