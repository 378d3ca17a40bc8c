"""`python -m experiments lds` as a person types it, on made-up text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.__main__ import app
from experiments.pages import read_tables
from tests.experiments.gpt.test_setups import TINY, without_network
from typer.testing import CliRunner

from experiments.gpt import setups as gpt_setups


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(gpt_setups.SETUPS, "finetune", TINY)
    yield from without_network()


def test_json_and_page_have_the_same_rows(tmp_path: Path) -> None:
    page = tmp_path / "lds.md"
    call = ["lds", "--modes", "finetune", "--drops", "4", "--queries", "4", "--methods", "BM25,gradient cosine", "--page", str(page)]  # fmt: skip
    done = CliRunner().invoke(app, [*call, "--json"], catch_exceptions=False)
    (run,) = json.loads(done.stdout.strip().splitlines()[-1])["runs"]
    assert [row["method"] for row in run["rows"]] == ["gradient cosine", "BM25"]
    assert run["seeds"] == [20]
    table = read_tables(page.read_text())[1]
    assert table["section"] == "fine-tuned GPT, seed 20"
    for row, cells in zip(run["rows"], table["rows"], strict=True):
        assert cells[0] == row["method"]
        assert cells[1].startswith(f"{row['mean']:.3f} [")
    assert json.loads((tmp_path / "lds.json").read_text())["tables"][1]["rows"] == table["rows"]
