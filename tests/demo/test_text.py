"""The text demo on made-up text: its results are the library's, and its report needs no network."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.demo.test_texts import TINY, without_network
from typer.testing import CliRunner

import backstory
from backstory.cli import demo as command
from backstory.cli.app import app
from backstory.demo import texts
from backstory.demo.pretrained import TextSetup
from backstory.demo.stages import prepare_folder
from backstory.demo.texts import RECIPE, scope
from backstory.errors import StoreError, UsageError
from backstory.insight import sources, timeline
from backstory.run.queries import open_queries

SCOPE = scope(TextSetup(**TINY))


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("demo")
    small = texts.text_demo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "text_demo", lambda out, progress: small(out, progress=progress, **TINY))
        done = CliRunner().invoke(app, ["demo", "text", "--out", str(out), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "helped by" in done.stdout
    assert "Value of each source" in done.stdout
    assert SCOPE in " ".join(done.stdout.split())
    return json.loads(done.stdout.strip().splitlines()[-1]), out


def test_a_run_is_left_that_can_be_queried_and_replayed(actual: tuple[dict[str, Any], Path]) -> None:
    result, out = actual
    run = backstory.open(out / "run")
    assert run.config["recipe"] == RECIPE
    assert {k: v for k, v in run.config["recipe_args"].items() if k != "sha256"} == TINY
    assert len(run.checkpoints) > 2
    assert run.query_sets == ["code", "law", "passages", "poems"]
    assert run.config["settings"]["curvature"] == "empirical/2"
    assert [q["domain"] for q in result["queries"]] == ["code", "law", "poems"]
    assert all(q["hits"][0]["influence"] > q["harmful"][0]["influence"] for q in result["queries"])
    assert result["scope"] == SCOPE
    assert result["loss"] < result["loss_before"]
    sample = result["queries"][0]["hits"][0]["sample"]
    assert run.content([sample])[sample]["source"] == sample.split("/")[0]


def test_sources_and_timeline_are_those_of_insight(actual: tuple[dict[str, Any], Path]) -> None:
    result, out = actual
    domains = ["code", "law", "poems"]
    one = open_queries(out / "run", ["passages", *domains], RECIPE)
    values = sources(one.run, one.model, one.loss, {name: one.batches[name] for name in domains})
    assert result["sources"]["sources"] == list(values.sources)
    for row, expected in zip(result["sources"]["matrix"], values.matrix.tolist(), strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-6)
    when = timeline(one.run, one.model, one.loss, one.batches["passages"])
    assert result["timeline"]["size"] == pytest.approx(when.size.tolist(), rel=1e-3)


def test_the_report_is_the_run_s_own_and_names_what_is_not_recorded(actual: tuple[dict[str, Any], Path]) -> None:
    page = (actual[1] / "report.html").read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "This report contains training data." in outside
    assert "For the query set passages." in outside
    assert f"<li>{SCOPE}</li>" in outside
    assert "Checked by retraining" not in outside
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', outside) == []


def test_another_demo_s_run_is_left_alone(actual: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run of the demo"):
        prepare_folder(actual[1] / "run", "another:recipe")
    assert prepare_folder(tmp_path / "new" / "run", RECIPE).parent.is_dir()


def test_words_other_than_images_and_text_are_refused() -> None:
    with pytest.raises(UsageError, match="Choose images or text"):
        command.demo("poems")
