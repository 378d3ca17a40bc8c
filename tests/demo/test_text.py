"""The text demo on made-up text: what it shows adds up, and its page needs no network."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plotly.offline import get_plotlyjs
from tests.demo.test_texts import TINY, without_network
from typer.testing import CliRunner

import backstory
from backstory.cli import demo as command
from backstory.cli.app import app
from backstory.demo import text as text_demo
from backstory.demo.gpt_model import loss
from backstory.demo.images import fresh
from backstory.demo.text import TextResult
from backstory.demo.text_report import text_report
from backstory.demo.texts import RECIPE, recipe
from backstory.errors import StoreError, UsageError


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("demo")
    small = text_demo.text_demo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_demo, "text_demo", lambda out, say: small(out, say=say, **TINY))
        done = CliRunner().invoke(app, ["demo", "text", "--out", str(out), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "helped by" in done.stdout
    assert "trained from scratch, where recorded scores are weakest" in done.stdout
    return json.loads(done.stdout.strip().splitlines()[-1]), out


def test_a_run_is_left_that_can_be_asked_and_replayed(actual: tuple[dict[str, Any], Path]) -> None:
    result, out = actual
    run = backstory.open(out / "run")
    assert (run.config["recipe"], run.config["recipe_args"]) == (RECIPE, TINY)
    assert len(run.checkpoints) > 2
    assert run.query_sets == ["code", "law", "passages", "poems"]
    assert run.config["settings"]["curvature"] == "empirical/6"
    assert [q["domain"] for q in result["questions"]] == ["code", "law", "poems"]
    assert all(q["helpful"][0]["influence"] > q["harmful"][0]["influence"] for q in result["questions"])
    sample = result["questions"][0]["helpful"][0]["sample"]
    assert run.content([sample])[sample]["source"] == sample.split("/")[0]


def test_the_matrix_and_the_timeline_are_sums_of_the_same_scores(actual: tuple[dict[str, Any], Path]) -> None:
    result, out = actual
    run, plan = backstory.open(out / "run"), recipe(**TINY)
    model = run.load_weights(plan.model)
    each = [run.query(model, lambda m, x: loss(m, x).mean(), plan.queries[n]) for n in result["domains"]]
    for row, source in zip(result["matrix"], result["sources"], strict=True):
        own = [s for s in each[0].sample_ids.tolist() if s.startswith(source + "/")]
        assert row == pytest.approx([float(a.sum_over(own)[0]) for a in each], rel=1e-3, abs=1e-6)
    rates = run.steps().groups["rate"][:, 0]
    sizes = torch.stack([a.scores[0].abs() for a in each]).mean(0).reshape(8, 4).mean(1) / torch.from_numpy(rates)
    assert result["timeline"] == pytest.approx(sizes.tolist(), rel=1e-3)


def test_the_page_is_self_contained(actual: tuple[dict[str, Any], Path]) -> None:
    page = (actual[1] / "report.html").read_text()
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert re.findall(r'(?:src|href)="([^"]+)"', outside) == []
    assert not re.search(r"<script[^>]+src=", page)
    assert "This page contains training data" in page
    assert "<li>This net was trained from scratch" in page
    assert len(actual[0]["trust"]) > 2
    assert all(f"<h3>{name}</h3>" in page for name in ("code", "law", "poems"))


def test_text_is_only_text(actual: tuple[dict[str, Any], Path]) -> None:
    run = backstory.open(actual[1] / "run")
    hit = {"sample": "law/0/0", "influence": 0.5, "step": 3}
    asked = {"domain": "<b>", "text": "<script>alert(1)", "helpful": [hit], "harmful": []}
    shown = TextResult(**{**{k: v for k, v in actual[0].items() if k != "report"}, "questions": [asked]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "content", lambda ids: {"law/0/0": {"source": "<i>", "text": "<script>alert(2)"}})
        page = text_report(shown, run)
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;script&gt;alert(2)" in page
    assert not re.search(r"<script>alert|<b>|<i>", page.replace(get_plotlyjs(), ""))


def test_another_demo_s_run_is_left_alone(actual: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run of the demo"):
        fresh(actual[1] / "run", "another:recipe")
    assert fresh(tmp_path / "new" / "run", RECIPE).parent.is_dir()


def test_words_other_than_images_and_text_are_refused() -> None:
    with pytest.raises(UsageError, match="expected images, text or stories"):
        command.demo("poems")
