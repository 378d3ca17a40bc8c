"""`python -m experiments planted` as a person types it, on small digits and made-up text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.__main__ import app
from rich.console import Console
from tests.experiments.data.test_passages import without_network
from tests.experiments.data.test_texts import TINY
from typer.testing import CliRunner

from backstory.cli import output
from experiments.data import texts as domains_setups

LABELS = ["planted", "--kind", "labels", "--model", "tiny", "--epochs", "1", "--images", "64", "--seeds", "0"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(domains_setups.SETUPS, "finetune", TINY)
    monkeypatch.setattr(output, "out", Console(width=220))
    yield from without_network()


def test_table_json_and_page_say_the_same(tmp_path: Path) -> None:
    page = tmp_path / "planted.html"
    printed = CliRunner().invoke(app, [*LABELS, "--plot", str(page)], catch_exceptions=False).stdout
    actual = json.loads(CliRunner().invoke(app, [*LABELS, "--json"], catch_exceptions=False).stdout.splitlines()[-1])
    assert "labels: 6 of 64 samples" in printed
    for row in actual["rows"]:
        assert f"{row['auroc']:.3f} [{row['lower']:.3f}, {row['upper']:.3f}]" in printed
    assert f"by {actual['change'][0]:+.4f}." in printed
    assert "gradient-norm" in page.read_text(encoding="utf-8")


def test_text_has_its_own_share_unless_one_is_given() -> None:
    command = ["planted", "--kind", "reversed", "--seeds", "0", "--json"]
    for more, planted in (([], [2]), (["--share", "0.25"], [12])):
        told = CliRunner().invoke(app, [*command, *more], catch_exceptions=False).stdout.splitlines()[-1]
        assert json.loads(told)["planted"] == planted
