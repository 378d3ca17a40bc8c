"""`backstory leave-out` and `backstory exact --groups` as a person types them, on a small recorded run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.cli.leave_out import parse_groups
from backstory.demo.digits import RECIPE
from backstory.errors import UsageError
from backstory.run.queries import open_queries


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("leave out") / "run"
    shutil.copytree(digits_run, path)
    return path


def call(*args: str | Path) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = [x for x in result.stdout.splitlines() if not x.startswith(("Figure:", "{"))]
    assert max(map(len, lines), default=0) <= 80
    return result.stdout


def some_ids(run: Path, first: int) -> list[str]:
    """Samples that are first used late: a short training."""
    ids, steps = backstory.open(run).occurrences()
    return [str(x) for x in ids[steps >= first][:3]]


def test_it_trains_stores_and_prints_what_the_library_gives(run: Path, tmp_path: Path) -> None:
    ids = some_ids(run, 20)
    file = tmp_path / "late.txt"
    file.write_text("\n".join(ids) + "\n")
    stored = call("leave-out", run, "--by", "ids", "--ids", file, "--twins", "1")
    assert "late" in stored
    assert "first step" in stored
    assert "--queries NAME" in " ".join(stored.split())
    printed = call("leave-out", run, "--ids", file, "--twins", "1", "--queries", "test:0,2", "--at", "all")
    for words in ("Change of the query's loss", "uses", "Effect on each query", "Effect at each checkpoint"):
        assert words in printed
    actual = json.loads(call("leave-out", run, "--ids", file, "--twins", "1", "--queries", "test:0,2", "--json"))
    changes = backstory.open(run).leave_out({"late": list(map(int, ids))}, twins=1)
    expected = open_queries(run, ["test:0", "test:2"], RECIPE).effects(changes)
    assert actual == json.loads(json.dumps(expected.as_dict()))
    assert actual["queries"] == ["test:0", "test:2"]


def test_tangents_of_combinations_are_a_matrix(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "effects.html"
    printed = call("exact", run, "--groups", "thirds,parts:2", "--queries", "few", "--plot", page, "--notes")
    assert "Exact first-order influence of each group" in printed
    assert "thirds, parts:2" in printed
    assert "steps 0–" in printed
    assert "effects of groups add up" in " ".join(printed.split())
    assert page.exists()
    actual = json.loads(call("exact", run, "--groups", "thirds,parts:2", "--json"))
    assert actual["kind"] == "tangent"
    assert [x["group"] for x in actual["groups"]] == [
        "early, steps 0–13", "middle, steps 0–13", "middle, steps 14–27", "late, steps 14–27"
    ]  # fmt: skip


def test_what_cannot_be_meant_is_refused_in_a_sentence(run: Path) -> None:
    with pytest.raises(UsageError, match="--by ids needs --ids"):
        parse_groups(run, "ids", None)
    for typed in (["exact", str(run)], ["exact", str(run), "--queries", "few", "--at", "all"]):
        wrong = CliRunner().invoke(app, typed)
        assert wrong.exit_code == 2
        assert "--groups" in wrong.output


def test_groups_by_words_or_by_samples(run: Path) -> None:
    assert parse_groups(run, "source,parts:2", None) == "source,parts:2"
    assert parse_groups(run, "source", "1, 2") == {"named": [1, 2]}
