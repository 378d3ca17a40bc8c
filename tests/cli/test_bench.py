"""The benches print the keys that others rely on."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backstory import benchmarks
from backstory.cli.app import app


def run(*args: str) -> Any:
    found = CliRunner().invoke(app, ["bench", *args], catch_exceptions=False)
    return json.loads(found.stdout.strip().splitlines()[-1])


def test_bench_embed_has_its_keys() -> None:
    found = run("embed", "--p", "64", "--repeats", "1", "--json")
    assert {"samples_per_s", "share_of_peak", "against_literal"} <= found.keys()
    assert found["threads"] == 1
    assert found["samples_per_s"] > 0


def test_bench_all_writes_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "bench_embed", lambda: {"samples_per_s": 12.5})
    monkeypatch.setattr(benchmarks, "bench_record", lambda: {"threads": 1, "workloads": [{"name": "W", "ratio": 1.5}]})
    file = tmp_path / "benchmarks.md"
    found = run("all", "--write", str(file), "--json")
    assert found["record"]["workloads"][0]["ratio"] == 1.5
    text = file.read_text()
    assert "| samples_per_s | 12.5 |" in text
    assert "**W**" in text
