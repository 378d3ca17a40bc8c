"""The page: one table a benchmark, one configuration a line, no empty columns."""

from typing import Any

from backstory.benchmarks.page import TABLES, WORDS, page, short, table


def test_every_benchmark_has_its_words_and_tables() -> None:
    assert WORDS.keys() == TABLES.keys()


def test_cells() -> None:
    cells = [short(x) for x in (None, True, False, 0.12345, 12345.6, 20608, "a|b")]
    assert cells == ["", "yes", "no", "0.123", "12,346", "20,608", "a/b"]


def test_a_table_leaves_out_columns_that_no_row_fills() -> None:
    rows: list[dict[str, Any]] = [{"rival": "X", "query_s": 0.5}, {"rival": "Y", "failed": "no torchvision"}]
    columns = (("rival", "rival"), ("index_s", "index, s"), ("query_s", "queries, s"), ("failed", "no figures because"))
    assert table(rows, columns) == [
        "| rival | queries, s | no figures because |",
        "|---|---|---|",
        "| X | 0.5 |  |",
        "| Y |  | no torchvision |",
    ]


def test_the_page_has_what_was_run() -> None:
    text = page({"record": {"rows": [{"workload": "B", "configuration": "default", "ratio": 1.05}]}})
    assert "## `backstory bench record`" in text
    assert "| B | default | 1.05 |" in text
    assert "bench peers" not in text
