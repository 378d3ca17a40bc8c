"""Typed texts against the run of `backstory demo text`: which source leads the totals, and how many of the top ten are of the text's domain.

The demo's sources have as many passages each, to within one, so that a source's total needs no correction for its size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backstory.errors import UsageError
from backstory.insight.sources import sources_of
from backstory.run.queries import Queries, open_queries
from experiments.harness import Say, silent

TOP, HALF = 10, 5  # samples that are looked at, and how many of them make a half
LEAST_LEADING, LEAST_HALF = 13, 11  # of sixteen


def check_queries(run: Path, recipe: str, queries: Sequence[tuple[str, str]], say: Say = silent) -> dict[str, Any]:
    """One row for each `(domain, text)`, and the two counts."""
    opened, rows = open_queries(run, [], recipe), []
    for n, (domain, text) in enumerate(queries):
        rows.append(check_query(opened, domain, text))
        say("queries", n + 1, len(queries))
    return {
        "run": str(run),
        "queries": rows,
        "leading": sum(row["leads"] == row["domain"] for row in rows),
        "half_of_the_top": sum(row["of_the_top"] >= HALF for row in rows),
        "top": TOP,
    }


def check_query(opened: Queries, domain: str, text: str) -> dict[str, Any]:
    """The totals by source of one typed text, and its most helpful samples; long texts are several rows of one query."""
    if opened.page.text is None:
        raise UsageError("this run takes no typed text: its recipe has no page=Presentation(text=…).")
    batch = opened.page.text(text)
    influence = opened.run.query(opened.model, lambda model, rows: opened.loss(model, rows).sum(), batch)
    totals = {value.source: value.value for value in sources_of(opened.run, {"typed": influence}, draws=40).total}
    hits = influence.top(TOP, query=0)
    return {
        "domain": domain,
        "text": text,
        "leads": max(totals, key=lambda name: totals[name]),
        "of_the_top": sum(hit.source == domain for hit in hits),
        "totals": totals,
        "top": [{"sample": hit.sample, "source": hit.source, "influence": hit.influence} for hit in hits],
    }


def least(of_sixteen: int, n: int) -> int:
    """The same share of n texts, rounded up."""
    return -(-of_sixteen * n // 16)


def lines(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows as they are printed."""
    return [
        (row["domain"], row["text"].strip(), row["leads"], f"{row['totals'][row['leads']]:+.4f}",
         f"{row['totals'].get(row['domain'], 0.0):+.4f}", f"{row['of_the_top']} of {result['top']}")
        for row in result["queries"]
    ]  # fmt: skip
