"""The page: one table a benchmark, one configuration a line, no empty columns."""

from typing import Any

from experiments.bench.page import TABLES, WORDS, page, short, table
from experiments.pages import RESULTS


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
    assert "## `python -m experiments bench record`" in text
    assert "| B | default | 1.05 |" in text
    assert "bench peers" not in text


def test_the_document_of_the_service_is_as_this_page_writes_it() -> None:
    row = {
        "occurrences": 20480, "dims": 4288, "start_s": 4.792, "starts": 5, "cold_median_s": 0.2036, "cold_p95_s": 0.2118, "questions": 100,
        "warm_median_s": 0.03877, "warm_p95_s": 0.04149, "clients": 32, "seconds": 60.0, "answers": 2926, "answers_per_s": 48.767,
        "crowd_median_s": 0.66447, "crowd_p95_s": 0.69645, "errors": 0, "bytes": 1234350080, "memory_growth": 0.0,
    }  # fmt: skip
    section = page({"serve": {"rows": [row]}}).partition("## `python -m experiments bench serve`")[2].strip()
    assert section in (RESULTS / "benchmarks.md").read_text(encoding="utf-8")
