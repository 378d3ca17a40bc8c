"""The benches print the keys that others rely on, and `all` writes the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from experiments.__main__ import app
from rich.console import Console
from typer.testing import CliRunner

from backstory.cli import output
from backstory.errors import UsageError
from experiments.bench import efficiency, embedding, ours, recording, rivals, serving, storing, sweeping


def run(*args: str) -> Any:
    actual = CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    return json.loads(actual.stdout.strip().splitlines()[-1])


def test_bench_record_has_its_keys() -> None:
    actual = run("record", "--workloads", "A", "--scale", "tiny", "--json")
    assert actual["threads"] == 1
    assert {"ratio", "cpu_ratio", "run_ratio", "one_off_s", "bytes_per_occurrence"} <= actual["rows"][0].keys()


def test_bench_record_takes_fidelity_from_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "peak_memory", lambda *_: 1.5)
    study = tmp_path / "gpt.json"
    study.write_text('seed 0\n{"rows": [{"method": "default", "mean": 0.75}]}\n')
    actual = run("record", "--workloads", "B", "--scale", "tiny", "--study", str(study), "--json")
    assert actual["rows"][0]["fidelity"] == 0.75
    study.write_text("nothing")
    with pytest.raises(UsageError, match="is not the output of a command with --json"):
        run("record", "--workloads", "B", "--scale", "tiny", "--study", str(study), "--json")


def test_bench_embed_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "bench_sweep", lambda **_: {"disk": [], "slopes": []})
    actual = run("embed", "--p", "64", "--repeats", "1", "--scale", "tiny", "--json")
    assert {"samples_per_s", "share_of_peak", "against_literal"} <= actual["memory"][0].keys()
    assert [line["rows_per_step"] for line in actual["memory"]] == [16, 4, 1]
    assert actual["threads"] == 1


def test_bench_query_has_its_keys() -> None:
    actual = run("query", "--repeats", "1", "--scale", "tiny", "--json")
    assert {"index_s", "embeddings_s", "adjoint_s", "occurrences", "queries"} <= actual["rows"][0].keys()


def test_bench_store_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        efficiency, "bench_efficiency", lambda **_: [{"method": "M", "stage": "S", "samples_per_s": 2.5}]
    )
    monkeypatch.setattr(storing, "STEPS", 2)
    actual = run("store", "--scale", "tiny", "--json")
    assert {"configuration", "bytes_per_occurrence", "times_smaller"} <= actual["rows"][0].keys()
    assert actual["efficiency"][0]["samples_per_s"] == 2.5


def test_bench_peers_reports_a_rival_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any) -> Path:
        raise rivals.Failed("installing it: no matching distribution")

    monkeypatch.setattr(rivals, "environment", no)
    monkeypatch.setattr(ours, "bench_ours", lambda **_: [{"rival": "Backstory", "workload": "A", "query_s": 0.1}])
    rows = run("peers", "--venvs", str(tmp_path), "--scale", "tiny", "--json")["rows"]
    assert rows[0]["rival"] == "Backstory"
    assert [row["workload"] for row in rows] == sorted(row["workload"] for row in rows)
    assert len(rows) == 1 + 2 * len(rivals.RIVALS)
    assert sum("no matching distribution" in row.get("failed", "") for row in rows) == 2 * len(rivals.RIVALS) - 1


def test_bench_all_writes_markdown_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"workload": "B: GPT", "configuration": "default", "ratio": 1.5}
    monkeypatch.setattr(recording, "bench_record", lambda **_: {"threads": 1, "rows": [line]})
    monkeypatch.setattr(embedding, "bench_in_memory", lambda **_: [{"p": 1024, "samples_per_s": 12.5}])
    monkeypatch.setattr(sweeping, "bench_sweep", lambda **_: {"disk": [], "slopes": []})
    monkeypatch.setattr("experiments.bench.asking.bench_query", lambda **_: {"rows": [{"index_s": 0.25}]})
    monkeypatch.setattr("experiments.bench.exact.bench_exact", lambda **_: {"rows": [{"reverse 1": 4.25}]})
    monkeypatch.setattr(storing, "bench_store", lambda **_: [{"times_smaller": 16.0}])
    monkeypatch.setattr(efficiency, "bench_efficiency", lambda **_: [{"method": "M", "samples_per_s": 2.5}])
    monkeypatch.setattr(ours, "bench_ours", lambda **_: [])
    monkeypatch.setattr(
        rivals, "bench_rivals", lambda *_, **__: [{"workload": "A", "rival": "X", "failed": "it sleeps"}]
    )
    monkeypatch.setattr("experiments.bench.serving.bench_serve", lambda **_: {"rows": [{"clients": 32, "errors": 0}]})
    file = tmp_path / "benchmarks.md"
    actual = run("all", "--write", str(file), "--json")
    assert actual["record"]["rows"][0]["ratio"] == 1.5
    text = file.read_text()
    assert "| B: GPT | default | 1.5 |" in text
    assert "| 1,024 | 12.5 |" in text
    assert "| A | X | it sleeps |" in text
    assert "| 32 | 0 |" in text
    assert text.count("\n## ") == 7
    tables = json.loads(file.with_suffix(".json").read_text())["tables"]
    assert ["B: GPT", "default", "1.5"] in [row for table in tables for row in table["rows"]]


ROW = {"occurrences": 20480, "warm_median_s": 0.0375, "errors": 0, "memory_growth": None}


def test_figures_as_json_and_as_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def actual(run: Path | None, **how: Any) -> dict[str, Any]:
        asked.append((run, how))
        return {"rows": [ROW]}

    monkeypatch.setattr(serving, "bench_serve", actual)
    monkeypatch.setattr(output, "out", Console(width=300))
    plain = CliRunner().invoke(
        app, ["bench", "serve", str(tmp_path), "--clients", "3", "--json"], catch_exceptions=False
    )
    assert json.loads(plain.stdout) == {"rows": [ROW]}
    assert asked[0][0] == tmp_path
    assert (asked[0][1]["clients"], asked[0][1]["seconds"]) == (3, 60.0)
    table = CliRunner().invoke(app, ["bench", "serve"], catch_exceptions=False)
    assert "20,480" in table.stdout
    assert "0.0375" in table.stdout
    assert asked[1][0] is None
