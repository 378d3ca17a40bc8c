"""`backstory calibrate` and `backstory check` as a person types them, on a small recorded run."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.results.origin import BY_REPLAY


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quality") / "my run"
    shutil.copytree(digits_run, path)
    return path


def call(*args: str | Path) -> Any:
    made = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "80"})
    assert made.exit_code == 0, made.output
    return made


def test_calibrate_prints_and_stores_what_results_then_carry(run: Path) -> None:
    before = " ".join(call("query", run, "--queries", "few:0", "--trust-recipe").stdout.split())
    assert "Quality: not measured. To measure how reliable the ranking is: `backstory calibrate " in before
    assert "my run' --queries" in before
    printed = call("calibrate", run, "--queries", "few", "--removals", "9", "--singles", "2", "--trust-recipe")
    assert max(map(len, printed.stdout.splitlines())) <= 80
    opened, text = backstory.open(run), " ".join(printed.stdout.split())
    assert opened.quality().measured
    for quality in (opened.quality(mean=True), opened.quality()):
        assert quality.sentence in text
    again = call("calibrate", run, "--queries", "few", "--removals", "9", "--singles", "2", "--json", "--trust-recipe")
    sent = json.loads(again.stdout.strip().splitlines()[-1])
    assert sent["mean"]["whole"] == json.loads(json.dumps(opened.quality(mean=True).as_dict()))["whole"]
    assert sent["exact"]["first_order"]["trainings"] == 9
    after = call("query", run, "--queries", "test:1", "--trust-recipe")
    assert opened.quality().sentence in " ".join(after.stdout.split())
    assert opened.quality().sentence in " ".join(call("inspect", run).stdout.split())


def test_a_command_that_is_named_runs_as_it_is_typed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's path has a space, and it lies in the working directory."""
    monkeypatch.chdir(run.parent)
    sent = json.loads(call("query", run.name, "--queries", "few", "--trust-recipe", "--json").stdout)
    made = shlex.split(sent["to_exact"].split("`")[1])
    assert made == ["backstory", "exact", "my run", "--queries", "few", "--each"]
    call(*made[1:], "--trust-recipe")
    again = call("query", *made[2:5], "--trust-recipe", "--json").stdout
    assert json.loads(again)["origin"] == BY_REPLAY
    told = shlex.split(backstory.open(run).quality(exact=True, at=3).command)
    assert told == ["backstory", "calibrate", "my run", "--queries", "few", "--at", "3"]
    assert "backstory embed 'my run'" in " ".join(call("inspect", run.name).stdout.split())


def test_check_puts_retraining_beside_prediction(run: Path) -> None:
    call("exact", run, "--queries", "few:0", "--trust-recipe")
    printed = call("check", run, "--queries", "few:0", "--samples", "8", "--trust-recipe", "--json")
    sent = json.loads(printed.stdout.strip().splitlines()[-1])
    assert len(sent["samples"]) == len(sent["retrained"]) == 10
    assert sent["ends"] == 2
    assert 0 <= sent["clear"] <= 1
    assert sent["floor"][0] >= 0
    table = call("check", run, "--queries", "few:0", "--samples", "2", "--trust-recipe").stdout
    assert "first or last" in table
    assert max(map(len, table.splitlines())) <= 80
    assert (sent["method"], sent["origin"]) == ("exact unrolling", "Exact: computed through the replayed training.")
    recorded = call(
        "check", run, "--queries", "few:0", "--samples", "0", "--method", "adjoint", "--json", "--trust-recipe"
    )
    assert json.loads(recorded.stdout.strip().splitlines()[-1])["method"] == "adjoint"
    assert not (run / "exact-work").exists()


def test_what_cannot_be_measured_is_a_sentence(run: Path) -> None:
    made = CliRunner().invoke(app, ["calibrate", str(run), "--queries", "few:1", "--trust-recipe"])
    assert made.exit_code != 0
    assert "calibrate takes a query set" in str(made.exception)
