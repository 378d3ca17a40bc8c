"""Typed texts against a very small run of the text demo on made-up text: the totals are those of the library."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments.__main__ import app
from experiments.demo_queries.development import DEVELOPMENT
from experiments.demo_queries.queries import QUERIES
from experiments.demo_queries.study import check_queries, least
from tests.demo.test_texts import TINY, without_network
from typer.testing import CliRunner

from backstory.demo.data.domains import SOURCES
from backstory.demo.texts import RECIPE, text_demo
from backstory.run.queries import open_queries
from experiments.demo_queries import development, queries

TYPED = (("law", "abcdef fedcba abcabc"), ("poems", "ghijkl lkjihg " * 4), ("nowhere", "mnopqr"))


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    text_demo(out, **TINY)
    return out


def test_there_are_two_for_each_domain() -> None:
    assert sorted(domain for domain, _ in QUERIES) == sorted([*SOURCES, *SOURCES])
    assert len({text for _, text in QUERIES}) == 16


def test_the_texts_that_settings_are_chosen_on_are_others() -> None:
    texts = [text for _, text in DEVELOPMENT]
    assert not {text for _, text in QUERIES} & set(texts)
    assert {domain for domain, _ in DEVELOPMENT} == set(SOURCES)
    assert len(set(texts)) == len(texts) == 79
    assert (least(13, 16), least(13, 79), least(11, 79)) == (13, 65, 55)


def test_totals_are_sums_over_the_source_s_passages(demo: Path) -> None:
    result = check_queries(demo / "run", RECIPE, TYPED)
    one = open_queries(demo / "run", [], RECIPE)
    assert one.page.text is not None
    for row, (_, text) in zip(result["queries"], TYPED, strict=True):
        influence = one.run.query(one.model, one.loss, one.page.text(text))
        scores = influence.scores.sum(0)  # a long text has several rows
        sums = {name: 0.0 for name in row["totals"]}
        for sample, x in zip(influence.sample_ids, scores.tolist(), strict=True):
            sums[str(sample).split("/")[0]] += x
        assert row["totals"] == pytest.approx(sums, rel=1e-4, abs=1e-7)
        assert sums[row["leads"]] == max(sums.values())
        best = scores.argsort(descending=True)[:10].tolist()
        assert row["of_the_top"] == sum(str(influence.sample_ids[k]).startswith(row["domain"]) for k in best)
    assert result["leading"] == sum(row["leads"] == row["domain"] for row in result["queries"])
    assert result["queries"][2]["of_the_top"] == 0
    assert result["half_of_the_top"] == sum(row["of_the_top"] >= 5 for row in result["queries"])


def test_the_command_prints_rows_and_counts(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "QUERIES", TYPED)
    monkeypatch.setattr(development, "DEVELOPMENT", TYPED[:1])
    call = ["demo-queries", "--out", str(demo)]
    printed = CliRunner().invoke(app, call, catch_exceptions=False).stdout
    assert "of 3 (wanted: 3)" in " ".join(printed.split())
    result = json.loads(CliRunner().invoke(app, [*call, "--json"], catch_exceptions=False).stdout.splitlines()[-1])
    assert [row["domain"] for row in result["queries"]] == ["law", "poems", "nowhere"]
    few = CliRunner().invoke(app, [*call, "--development", "--json"], catch_exceptions=False).stdout.splitlines()[-1]
    assert json.loads(few)["queries"] == result["queries"][:1]
