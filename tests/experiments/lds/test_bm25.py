"""BM25 by hand on three texts."""

import math

import pytest
from experiments.lds.bm25 import B, K, bm25


def test_scores_are_the_formula_s_own() -> None:
    texts = ["The court, the court.", "a tree", "a river of a tree"]
    actual = bm25(["Court tree", "nothing"], texts)
    mean = (4 + 2 + 5) / 3
    once, twice = math.log(1 + 2.5 / 1.5), math.log(1 + 1.5 / 2.5)  # words of one text, and of two

    def part(times: int, size: int) -> float:
        return times * (K + 1) / (times + K * (1 - B + B * size / mean))

    expected = [once * part(2, 4), twice * part(1, 2), twice * part(1, 5)]
    assert actual[0].tolist() == pytest.approx(expected)
    assert actual[1].tolist() == [0.0, 0.0, 0.0]


def test_a_word_that_stands_twice_in_the_query_counts_twice() -> None:
    once, twice = bm25(["tree", "tree tree"], ["a tree", "a river"])
    assert twice.tolist() == pytest.approx((2 * once).tolist())
