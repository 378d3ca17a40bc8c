"""The whole demo on the small digits: it trains, asks, proves and writes a page that needs no network."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.demo.digits import RECIPE
from backstory.demo.images import demo
from backstory.errors import StoreError
from backstory.insight import phases, timeline
from backstory.replay.queries import open_queries


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    out = tmp_path_factory.mktemp("demo")
    done = CliRunner().invoke(app, ["demo", "--out", str(out), "--source", "digits", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout.strip().splitlines()[-1]), out


def test_the_demo_answers_and_proves(actual: tuple[dict[str, object], Path]) -> None:
    result, out = actual
    assert result["accuracy"] > 0.8  # type: ignore[operator]
    assert result["spearman"] > 0.3  # type: ignore[operator]
    queries = result["queries"]
    assert isinstance(queries, list)
    assert len(queries) == 5
    assert all(q["helpful"][0]["influence"] > 0 > q["harmful"][0]["influence"] for q in queries)
    assert backstory.open(out / "run").checkpoints


def test_its_timeline_says_the_same_without_the_last_tenth_of_the_steps(actual: tuple[dict[str, object], Path]) -> None:
    one = open_queries(actual[1] / "run", ["test"], RECIPE)
    when = timeline(one.run, one.model, one.loss, one.batches["test"])
    assert when.phases.shape == "rises"
    assert phases(when.size[: -len(when.size) // 10]).shape == "rises"


def test_its_lists_do_not_begin_with_the_last_step(actual: tuple[dict[str, object], Path]) -> None:
    result, _ = actual
    first = [q[side][0]["step"] for q in result["queries"] for side in ("helpful", "harmful")]  # type: ignore[attr-defined]
    assert sum(step >= 0.95 * result["steps"] for step in first) <= 2, first  # type: ignore[operator]


def test_the_page_is_self_contained(actual: tuple[dict[str, object], Path]) -> None:
    page = (actual[1] / "report.html").read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)  # Plotly's own code names addresses it does not load
    assert re.findall(r'(?:src|href)="(?!data:)([^"]+)"', outside) == []
    assert not re.search(r"<script[^>]+src=", page)
    assert outside.count("data:image/png;base64,") == 5 + 50
    assert "This page contains" in page
    assert "training data" in page


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="not a run"):
        demo(tmp_path, source="digits")
    assert (tmp_path / "run" / "thesis.txt").exists()
