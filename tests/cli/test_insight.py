"""The insight commands as a person types them, on a small recorded run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import backstory
from backstory import insight
from backstory.cli.app import app
from backstory.demo.digits import loss, recipe
from backstory.errors import UsageError

TRUST = ("--trust-recipe",)


def call(*args: str | Path) -> str:
    actual = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "80"})
    if actual.exception is not None:
        raise actual.exception
    assert max(map(len, actual.stdout.splitlines())) <= 80 or "--json" in args
    return actual.stdout


def cells_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")] for line in printed.splitlines() if "│" in line]


def values(*args: str | Path) -> Any:
    return json.loads(call(*args, *TRUST, "--json").strip().splitlines()[-1])


@pytest.fixture(scope="module")
def run(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with sources: even images come from one place, odd ones from another; texts with brackets in them."""
    path = tmp_path_factory.mktemp("insight") / "run"
    shutil.copytree(digits_run, path)
    opened = backstory.open(path)
    ids = [int(x["id"]) for x in opened._store.samples().to_pylist()]
    places = [("even", "odd")[i % 2] for i in ids]
    opened.describe(ids, text=[f"[red]image {i}[/red]" for i in ids], label=[i % 10 for i in ids], source=places)
    x, y = recipe("digits").queries["test"]
    opened.add_queries("more", (x[3:8], y[3:8]))
    return path


@pytest.fixture(scope="module")
def model(run: Path) -> Any:
    return backstory.open(run).load_weights(recipe("digits").model)


def test_timeline_gives_what_the_library_gives(run: Path, model: Any, tmp_path: Path) -> None:
    opened = backstory.open(run)
    actual = values("timeline", run, "--queries", "few", "--plot", tmp_path / "page.html")
    expected = insight.timeline(opened, model, loss, opened.queries("few"))
    assert actual["per_rate"] == pytest.approx(expected.per_rate.tolist(), rel=1e-6)
    assert actual["phases"]["words"] == expected.phases.words
    assert "positive: the sample helped" in actual["sign"]
    page = (tmp_path / "page.html").read_text()
    assert "Queries: few." in page
    assert '<script src="http' not in page
    printed = call("timeline", run, "--queries", "few", *TRUST)
    assert expected.headline in printed
    steps = backstory.open(run).n_steps
    assert [line.split()[0] for line in printed.splitlines() if "█" in line] == ["magnitude", "signed"]
    assert any(
        line.strip().startswith("step 0") and line.endswith(f"step {steps - 1}") for line in printed.splitlines()
    )
    assert "Where influence is high" not in printed, "there are no phases in so short a run"


def test_periods_of_high_influence_are_printed_where_the_three_phases_are(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = np.arange(200) / 200
    valley = insight.phases(1 + 4 * np.maximum(0, 0.2 - t) / 0.2 + 2 * np.maximum(0, t - 0.6) / 0.4)
    plain = insight.timeline
    monkeypatch.setattr(insight, "timeline", lambda *a, **k: replace(plain(*a, **k), phases=valley))
    printed = call("timeline", run, "--queries", "few", *TRUST)
    assert "Where influence is high" in printed
    assert f"0 to {valley.windows[0].last - 1}" in printed


def test_timeline_of_the_recipes_own_set_at_a_checkpoint(run: Path) -> None:
    step = backstory.open(run).checkpoints[1]
    assert len(values("timeline", run, "--queries", "test", "--at", str(step))["influence"]) == step


def test_evolution_by_thirds_sources_and_ids(run: Path, model: Any) -> None:
    opened = backstory.open(run)
    actual = values("evolution", run, "--queries", "few")
    expected = insight.evolution(opened, model, loss, opened.queries("few"))
    assert actual["mean"]["late"][-1] == pytest.approx(float(expected.mean[2, -1]), rel=1e-6)
    assert list(values("evolution", run, "--queries", "few", "--by", "source")["mean"]) == ["even", "odd"]
    some = [x["id"] for x in opened._store.samples().to_pylist()[:2]]
    named = values("evolution", run, "--queries", "few", "--ids", ", ".join(some))
    assert named["samples"]["named"][-1] == 2


def test_evolution_prints_groups_down_and_checkpoints_across(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [str(c) for c in backstory.open(run).checkpoints if c]
    rows = cells_of(call("evolution", run, "--queries", "few", *TRUST))
    assert [row[0] for row in rows] == ["at step", "early", "middle", "late"]
    assert rows[0][1:] == steps
    plain = insight.evolution

    def many(*args: Any, **options: Any) -> insight.Evolution:
        result = plain(*args, **options)
        mean, samples = (np.tile(x[:, -1:], 40) for x in (result.mean, result.samples))
        return replace(result, checkpoints=tuple(range(100, 4100, 100)), mean=mean, samples=samples)

    monkeypatch.setattr(insight, "evolution", many)
    printed = call("evolution", run, "--queries", "few", *TRUST)
    shown = cells_of(printed)[0][1:]
    assert (shown[0], shown[-1]) == ("100", "4,000")
    assert 2 < len(shown) < 10
    assert f"{len(shown)} of 40 checkpoints fit here; --json has all of them." in printed


def test_overwriting_adds_up_and_shows_its_terms(run: Path, model: Any, tmp_path: Path) -> None:
    opened = backstory.open(run)
    sample = int(opened._store.read(0, 1, rows=False, samples=True).samples[0])  # type: ignore[index]
    actual = values("overwriting", run, "--queries", "few", "--sample", str(sample), "--plot", tmp_path / "page.html")
    left = actual["just_after"] + actual["momentum"] - actual["overwritten"] - actual["decay"]
    assert left == pytest.approx(actual["influence"], rel=1e-9)
    expected = opened.query(model, loss, opened.queries("few")).sum_over([sample]).mean()
    assert actual["influence"] == pytest.approx(float(expected), rel=1e-3)
    assert (tmp_path / "page.html").exists()
    other = opened._store.read(100, 101, rows=False, samples=True)
    assert other.samples is not None
    args = ("--queries", "few", "--sample", other.samples[0], "--step", str(int(other.step[0])))
    assert values("overwriting", run, *args)["steps"] == [int(other.step[0])]
    with pytest.raises(UsageError, match="was not used at step 0"):
        call("overwriting", run, *args[:-1], "0", *TRUST)
    text = call("overwriting", run, str(sample), "--queries", "few", "--step", "0", "--top", "3", *TRUST)
    for both in ((), (str(sample), "--sample", str(sample))):
        with pytest.raises(
            UsageError, match=f"name one sample to follow: `backstory overwriting {run} SAMPLE --queries few`"
        ):
            call("overwriting", run, *both, "--queries", "few", *TRUST)
    assert f"influence of sample {sample}" in text
    assert "Overwritten by" in text
    assert "just after its own steps" in text


def test_sources_with_several_query_sets(run: Path, tmp_path: Path) -> None:
    actual = values("sources", run, "--queries", "few", "--queries", "more", "--plot", tmp_path / "page.html")
    assert sorted(actual["sources"]) == ["even", "odd"]
    assert actual["domains"] == ["few", "more"]
    assert actual["cells"][0][0]["low"] <= actual["cells"][0][0]["high"]
    printed = call("sources", run, "--queries", "few", "--queries", "more", *TRUST)
    assert "Value for each query set" in printed
    assert ["source", "few", "more"] in cells_of(printed)
    assert len(values("sources", run, "--queries", "few", "--by", "label")["sources"]) == 10


def test_harmful_shows_text_as_it_is(run: Path) -> None:
    actual = values("harmful", run, "--queries", "few", "--top", "3")
    influences = [h["influence"] for h in actual["harmful"]]
    assert influences == sorted(influences)
    assert actual["helpful"][0]["influence"] > 0 > influences[0]
    text = call("harmful", run, "--queries", "few", "--top", "3", *TRUST)
    assert f"[red]image {actual['harmful'][0]['sample']}[/red]" in text
    rows = cells_of(text)
    assert rows[0] == ["sample", "label", "source", "step", "influence", "text"]
    assert [row[0] for row in rows[1:4]] == [str(h["sample"]) for h in actual["harmful"]]


def test_many_query_sets_are_printed_in_several_tables(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = insight.sources

    def many(*args: Any, **options: Any) -> insight.Sources:
        result = plain(*args, **options)
        cells = tuple(row * 12 for row in result.cells)
        return replace(result, domains=tuple(f"domain {k}" for k in range(12)), cells=cells)

    monkeypatch.setattr(insight, "sources", many)
    rows = cells_of(call("sources", run, "--queries", "few", *TRUST))
    assert [name for row in rows for name in row if name.startswith("domain")] == [f"domain {k}" for k in range(12)]


@pytest.mark.parametrize("name", ["timeline", "evolution", "sources", "harmful", "overwriting"])
def test_one_line_of_caveats_and_all_of_them_as_notes(run: Path, name: str) -> None:
    sample = str(backstory.open(run)._store.read(0, 1, rows=False, samples=True).samples[0])  # type: ignore[index]
    args = (name, run, "--queries", "few", *(("--sample", sample) if name == "overwriting" else ()), *TRUST)
    sent = json.loads(call(*args, "--json").strip().splitlines()[-1])
    printed = call(*args)
    last = " ".join(printed.strip().splitlines()[-1:])
    assert last.startswith("+ helped, − hurt. ")
    assert last.endswith(" notes: --notes")
    assert sent["quality"]["sentence"] in " ".join(printed.split())
    noted = " ".join(call(*args, "--notes").split())
    said = (
        sent["sign"],
        sent["unit"],
        *sent["caveats"],
        *sent["words"],
        *sent["recording"]["words"],
        sent["quality"]["sentence"],
    )
    assert all(text in noted for text in said)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["timeline", "--queries", "nothing"], "The run and its recipe have: few, more, test"),
        (["overwriting", "--queries", "few", "--sample", "99999999"], "was not used"),
        (["overwriting", "--queries", "few", "--sample", "abc"], "integers"),
        (["evolution", "--queries", "few", "--by", "colour"], "'thirds', 'steps', 'source', 'label'"),
        (["sources", "--queries", "few", "--queries", "few"], "listed twice"),
    ],
)
def test_errors_say_what_to_do(run: Path, args: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(args[0], run, *args[1:], *TRUST)


def test_a_missing_package_is_said_before_the_work(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"plotly: pip install '\.\[plot\]' in the checkout"):
        call("timeline", run, "--queries", "few", "--plot", tmp_path / "page.html", *TRUST)
