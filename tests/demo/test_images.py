"""The whole demo on the small digits: it trains, queries, checks by retraining and writes a report that needs no network."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.demo.digits import RECIPE, WRONG, WRONG_LABEL, image_demo
from backstory.errors import StoreError
from backstory.insight import harmful, phases, timeline
from backstory.results.origin import EXACT
from backstory.run.queries import open_queries


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    out = tmp_path_factory.mktemp("demo")
    done = CliRunner().invoke(app, ["demo", "--out", str(out), "--source", "digits", "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    *shown, last = done.stdout.strip().splitlines()
    return json.loads(last), out, "\n".join(shown)


def test_the_demo_queries_the_run_that_it_leaves(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, out, _ = actual
    assert result["accuracy"] > 0.8
    assert len(result["queries"]) == 5
    one = open_queries(out / "run", ["demo"], RECIPE)
    influence = one.run.query(one.model, one.loss, one.batches["demo"])
    for k, query in enumerate(result["queries"]):
        assert query["hits"][0]["influence"] > 0 > query["harmful"][0]["influence"]
        expected = influence.as_dict(top=5, query=k)
        for side in ("hits", "harmful"):
            assert [h["sample"] for h in query[side]] == [h["sample"] for h in expected[side]]
    assert [q["label"] for q in result["queries"]] == one.batches["demo"][1].tolist()
    assert [q["predicted"] for q in result["queries"]] == one.model(one.batches["demo"][0]).argmax(1).tolist()
    assert result["timeline"]["words"] == list(timeline(one.run, one.model, one.loss, one.batches["demo"]).words)
    assert backstory.open(out / "run").checkpoints


def test_its_recording_is_measured_by_exact_results_and_retraining(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, out, shown = actual
    quality = backstory.open(out / "run").quality()
    assert quality.measured
    assert quality.sentence in " ".join(shown.split())
    assert [q["quality"]["sentence"] for q in result["queries"]] == [quality.sentence] * 5
    assert quality.sentence.split(":")[0] in (out / "report.html").read_text()


def test_what_it_prints_says_of_which_loss_and_in_which_unit(actual: tuple[dict[str, Any], Path, str]) -> None:
    shown = " ".join(actual[2].split())
    assert "Influence on the loss of the true digit, 5 test images (+ helped, − hurt)" in shown
    assert shown.count("In nats: a loss of 1 nat is a probability of 1/e ≈ 37% for the true digit.") == 1


def test_its_results_are_checked_by_retraining(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, _, shown = actual
    check = result["check"]
    assert check["spearman"] > 0.9
    assert check["spearman_random"] > 0.8
    ends = {q[side][0]["sample"] for q in result["queries"] for side in ("hits", "harmful")}
    assert set(check["samples"][: check["ends"]]) == ends
    assert len(check["samples"]) == check["ends"] + 12
    assert check["words"][0] in " ".join(shown.split())
    first = {q: result["queries"][q]["hits"][0] for q in range(5)}
    for q, hit in first.items():
        row = check["samples"].index(hit["sample"])
        assert check["predicted"][row][q] == pytest.approx(hit["influence"])


def test_its_timeline_is_the_same_without_the_last_tenth_of_the_steps(actual: tuple[dict[str, Any], Path, str]) -> None:
    one = open_queries(actual[1] / "run", ["test"], RECIPE)
    when = timeline(one.run, one.model, one.loss, one.batches["test"])
    assert when.phases.shape == "rises"
    assert phases(when.size[: -len(when.size) // 10]).shape == "rises"


def test_its_lists_do_not_begin_with_the_last_step(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, _, _ = actual
    first = [q[side][0]["step"] for q in result["queries"] for side in ("hits", "harmful")]
    assert sum(step >= 0.95 * result["steps"] for step in first) <= 2, first


def test_the_report_is_the_run_s_own_with_the_check_in_it(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, out, _ = actual
    page = (out / "report.html").read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)  # Plotly's own code names addresses it does not load
    assert "This report contains training data." in outside
    assert "For the query set demo." in outside
    assert "<h2>Checked by retraining</h2>" in outside
    assert result["check"]["words"][0] in outside
    assert "were replaced by wrong ones on purpose" in outside
    assert 'data-figure="figure-check"' in outside
    for hit in result["queries"][0]["hits"]:  # those that a report shows
        assert f'sample <span class="mono">{hit["sample"]}</span>' in outside
    assert re.findall(r'(?:src|href)="(?!data:|#)([^"]+)"', outside) == []


def test_the_labels_that_were_replaced_are_found_among_the_harmful(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, out, shown = actual
    run, (few, many) = backstory.open(out / "run"), result["replaced"]["lists"]
    sources = {i: row["source"] for i, row in run.content(run.occurrences()[0]).items()}
    wrong = {i for i, source in sources.items() if source == WRONG_LABEL}
    assert len(wrong) == many["replaced"] == many["looked"] == round(WRONG * len(sources))
    one = open_queries(out / "run", ["test"], RECIPE)
    ranked = harmful(one.run, one.model, one.loss, one.batches["test"], top=len(wrong), method="exact").harmful
    for found in (few, many):
        assert found["by_influence"] == sum(str(x.sample) in wrong for x in ranked[: found["looked"]])
        assert found["by_influence"] > 5 * found["by_chance"]
        assert found["by_loss"] > 5 * found["by_chance"]
    assert result["replaced"]["words"] in " ".join(shown.split())


def test_what_is_made_from_mean_losses_is_exact(actual: tuple[dict[str, Any], Path, str]) -> None:
    result, out, _ = actual
    assert {x.query for x in backstory.open(out / "run").exact_results()} >= {"demo", "test"}
    assert result["timeline"]["method"] == EXACT


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="not a run"):
        image_demo(tmp_path, source="digits")
    assert (tmp_path / "run" / "thesis.txt").exists()
