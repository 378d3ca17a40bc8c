"""Commands as a person types them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest
from tests.run.test_compress import recorded
from tests.support.plain import assert_alike
from typer.testing import CliRunner

import backstory
from backstory.cli import output
from backstory.cli.app import app, main
from backstory.cli.inspect import print_contents
from backstory.demo.digits import loss, recipe
from backstory.errors import StoreError
from backstory.run.export import inspect as inspect_run


def call(*args: str | int | Path, code: int = 0, answer: str | None = None) -> str:
    actual = CliRunner().invoke(app, [str(a) for a in args], input=answer, catch_exceptions=True)
    if code == 0 and actual.exception is not None:
        raise actual.exception
    assert actual.exit_code == code, actual.output
    return actual.stdout


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


def test_query_prints_the_result_of_the_library(digits_run: Path) -> None:
    args = ("query", digits_run, "--queries", "few:1", "--top", "4", "--trust-recipe")
    run = backstory.open(digits_run)
    x, y = run.queries("few")
    result = run.query(run.load_weights(recipe("digits").model), loss, (x[1:2], y[1:2]))
    assert_alike(last_json(call(*args, "--json")), result.as_dict(top=4), rel=1e-4, abs=1e-6)
    printed, plain = call(*args), " ".join(call(*args, "--notes").split())
    assert result.title in printed
    model = run.load_weights(recipe("digits").model).eval()
    facts = (int(y[1]), int(model(x[1:2]).argmax()), loss(model, (x[1:2], y[1:2])).item())
    assert "Query few:1: label {}, predicted {}, loss {:.3g}.".format(*facts) in printed
    assert printed.strip().splitlines()[-1] == f"{result.brief} {len(result.remarks)} notes: --notes"
    assert all(text in plain for text in result.remarks)
    shown = [text for text in result.remarks if text in " ".join(printed.split())]
    assert result.quality is not None
    assert shown == [result.quality.sentence, result.to_exact], (
        "how right it is, and how to make it exact, are always printed"
    )


def test_query_prints_hits_with_their_content_in_80_columns(digits_run: Path) -> None:
    printed = call("query", digits_run, "--queries", "few:1", "--top", "2", "--trust-recipe")
    run = backstory.open(digits_run)
    x, y = run.queries("few")
    best, worst = run.query(run.load_weights(recipe("digits").model), loss, (x[1:2], y[1:2])).hits(2)
    assert fits(printed)
    cells = [[cell.strip() for cell in line.split("│")] for line in printed.splitlines() if "│" in line]
    assert [row for row in cells if row[0] == "sample"] == 2 * [["sample", "label", "step", "influence", "text"]]
    assert [row[0] for row in cells if row[0].isdigit()] == [str(h.sample) for h in (*best, *worst)]
    assert [row[1] for row in cells if row[0].isdigit()] == [h.label for h in (*best, *worst)]
    assert [row[4] for row in cells if row[0].isdigit()] == [h.text for h in (*best, *worst)]


def test_query_of_single_occurrences_by_the_papers_recursion(digits_run: Path) -> None:
    options = ("--per", "occurrence", "--contraction", "never", "--per-layer", "--top", "3", "--trust-recipe", "--json")
    run = backstory.open(digits_run)
    model = run.load_weights(recipe("digits").model)
    result = run.query(model, loss, run.queries("few"), contraction="never", per_layer=True)
    expected = result.as_dict(top=3, per="occurrence")
    assert_alike(last_json(call("query", digits_run, "--queries", "few", *options)), expected, rel=1e-4, abs=1e-6)


def test_query_at_a_checkpoint_and_of_the_recipes_own_set(digits_run: Path) -> None:
    step = backstory.open(digits_run).checkpoints[1]
    out = last_json(call("query", digits_run, "--queries", "test", "--at", str(step), "--trust-recipe", "--json"))
    assert out["at"] == step
    assert out["query"] == "mean"
    assert max(h["step"] for h in out["hits"]) < step


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["query", "RUN", "--queries", "nothing", "--trust-recipe"], "few, test"),
        (["query", "RUN", "--queries", "few:3", "--trust-recipe"], "must be between 0 and 2"),
        (["query", "RUN", "--queries", "few", "--recipe", "no.such:thing"], "could not import"),
        (["query", "RUN", "--queries", "few", "--at", "soon", "--trust-recipe"], "'final' or a step"),
        (["query", "RUN", "--queries", "few", "--at", "3", "--trust-recipe"], "no weights at step 3"),
        (["query", "RUN", "--queries", "few", "--contraction", "often"], "auto, always, never, when_expanding"),
        (["query", "RUN", "--queries", "few", "--per", "step"], "'sample', 'occurrence'"),
        (["embed", "RUN", "--at", "100000"], "at must be 'final' or a step from 1"),
        (["inspect", "nowhere"], "does not exist"),
        (["export", "RUN", "--to", "xml"], "parquet, csv"),
        (["erase", "RUN", "abc", "--yes"], "integers"),
        (["erase", "RUN", "99999999", "--yes"], "Nothing was erased"),
        (["demo", "--source", "foo"], "auto, mnist or digits"),
    ],
)
def test_errors_say_what_to_do(
    digits_run: Path,
    tmp_path: Path,
    args: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["backstory", *(str(digits_run) if a == "RUN" else a for a in args)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert says in said.replace("\n", " ")


def test_a_run_without_a_recipe_says_what_is_missing(digits_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    config = json.loads((run / "config.json").read_text())
    config["recipe"] = None
    (run / "config.json").write_text(json.dumps(config))
    actual = CliRunner().invoke(app, ["query", str(run), "--queries", "few"])
    assert "Pass --recipe package.module:function" in str(actual.exception)


def test_embed_then_query_uses_the_embeddings(digits_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    report = last_json(call("embed", run, "--json"))
    assert report["occurrences"] == backstory.open(run).n_occurrences
    out = last_json(call("query", run, "--queries", "few", "--trust-recipe", "--json"))
    assert out["method"] == "embeddings"
    literal = last_json(call("embed", run, "--contraction", "never", "--per-layer", "--json"))
    assert literal["form"] == "literal"
    assert literal["per_layer"]


def test_inspect_counts_and_verifies(digits_run: Path) -> None:
    actual = last_json(call("inspect", digits_run, "--verify", "--json"))
    assert actual["damage"] == []
    assert actual["run"]["steps"] == len(recipe("digits", epochs=1).batches)
    assert actual["gradients"]["share of squared norm covered, mean"] == pytest.approx(1.0)


def test_inspect_is_one_screen_and_has_the_rest_in_its_notes(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(digits_run.parent)  # hints have the run's path, which may be long
    printed = call("inspect", digits_run.name)
    assert fits(printed)
    assert len(printed.splitlines()) <= 24
    run = backstory.open(digits_run)
    assert f"{run.n_occurrences:,}, {run._store.bytes_per_row:,} bytes each" in printed
    assert "projection learned" in printed
    assert "4.weight 10 × 1024 →" in " ".join(printed.split())
    assert f"{', '.join(map(str, run.checkpoints))}; 1 between start and end" in printed
    assert "not checked: pass --verify" in printed
    assert "every file matches its checksum" in call("inspect", digits_run, "--verify")
    quality, words = run.quality(), run.recording_report().words
    assert quality.sentence in " ".join(printed.split())
    assert words[0] not in " ".join(printed.split())
    assert all(text in " ".join(call("inspect", digits_run, "--notes").split()) for text in (quality.sentence, *words))


def test_inspect_of_many_parameters_and_checkpoints_stays_one_screen(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(digits_run.parent)  # hints have the run's path, which may be long
    contents = inspect_run(Path(digits_run.name))
    contents["run"]["checkpoints"] = list(range(200))
    contents["parameters"] = {f"layers.{k}.weight": "768 × 768 -> 256 numbers a row" for k in range(100)}
    with output.out.capture() as printed:
        print_contents(contents, False)
    assert fits(printed.get())
    assert len(printed.get().splitlines()) <= 24
    assert "0, 1, 2, 3, …, 199 (200 in all)" in printed.get()
    assert "94 more: --notes" in printed.get()
    with output.out.capture() as printed:
        print_contents(contents, True)
    assert "layers.99.weight" in printed.get()


def test_damage_is_shown_and_fails(digits_run: Path, tmp_path: Path) -> None:
    shutil.copytree(digits_run, tmp_path / "run")
    next((tmp_path / "run").rglob("*.safetensors")).write_bytes(b"nothing")
    assert "every file matches" not in call("inspect", tmp_path / "run", "--verify", code=1)


def test_export_writes_every_table(digits_run: Path, tmp_path: Path) -> None:
    run = backstory.open(digits_run)
    for to in ("parquet", "csv"):
        files = last_json(call("export", digits_run, "--to", to, "--out", tmp_path / to, "--json"))["files"]
        assert sorted(Path(f).name for f in files) == sorted(f"{t}.{to}" for t in ("rows", "steps", "samples"))
    rows = pyarrow.parquet.read_table(tmp_path / "parquet" / "rows.parquet")
    assert len(rows) == run.n_occurrences
    assert {"step", "sample", "weight"} <= set(rows.column_names)
    assert len(pyarrow.csv.read_csv(tmp_path / "csv" / "steps.csv")) == run.n_steps


def test_erase_asks_and_erases(digits_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    sample = backstory.open(run)._store.samples().to_pylist()[0]["id"]
    assert CliRunner().invoke(app, ["erase", str(run), sample], input="n\n").exit_code == 1
    assert sample in backstory.open(run).content([sample])
    assert last_json(call("erase", run, sample, "--yes", "--json"))["erased"] == 1
    assert backstory.open(run).content([sample]) == {}
    assert CliRunner().invoke(app, ["erase", str(run)]).exit_code == 2


def test_version_is_the_packages() -> None:
    assert call("--version").strip() == backstory.__version__


def test_compress_reports_what_became_of_the_run(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run")
    text = call("compress", tmp_path / "run", tmp_path / "small", "--rank", 3, "--windows", 2)
    assert "6 curvature samples in 2 windows retain" in text
    assert "MB became" in text
    assert backstory.open(tmp_path / "small").config["compressed"]["rank"] == 3


def test_compress_as_json_and_without_a_limit(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run")
    report = last_json(call("compress", tmp_path / "run", tmp_path / "small", "--rank", 0, "--json"))
    assert report["path"] == str(tmp_path / "small")
    assert report["energy"] == pytest.approx(1.0, abs=1e-9)
    assert report["bytes_after"] > 0
    with pytest.raises(StoreError, match="already exists"):
        call("compress", tmp_path / "run", tmp_path / "small")
