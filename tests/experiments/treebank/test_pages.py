"""The pages of the treebank study: self-contained, and text is only text."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from experiments.plots import smooth
from experiments.treebank.copies import FUNCTION, METHODS, OURS
from experiments.treebank.pages import copies_figure, examples_page, faded_figure, pages, sizes_figure
from experiments.treebank.proofs import Proof
from experiments.treebank.run import TreebankSetup
from experiments.treebank.study import TreebankResult, study
from tests.experiments.treebank.test_run import TINY, without_network

from backstory.insight.phases import Side


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreebankResult]:
    for _ in without_network():
        yield study(TreebankSetup(**{**TINY, "epochs": 2}), tmp_path_factory.mktemp("pages"), count=4, checked=0)


def test_every_page_needs_no_network_and_says_how_far_to_trust_it(actual: TreebankResult) -> None:
    made = pages(actual)
    assert set(made) == {"timeline.html", "evolution.html", "copies.html", "examples.html"}
    for name, page in made.items():
        assert not re.search(r"<script[^>]+src=|<link", page), name
        assert "trained from scratch" in page or name == "copies.html"
    for one in (actual.timeline.phases, actual.signed, actual.undivided):
        assert one.words in made["timeline.html"]


def test_the_figure_shows_share_and_median_of_each_method(actual: TreebankResult) -> None:
    lines = copies_figure(actual).data
    assert [line.name for line in lines] == [m for m in METHODS for _ in range(2)]
    own = [one.result for one in actual.ranks if one.method == OURS]
    assert list(lines[0].x) == [1, 2]
    assert list(lines[0].y) == [x.share_first for x in own]
    assert list(lines[1].y) == [x.median_rank for x in own]


def test_sizes_are_drawn_by_rate_and_as_they_are_with_the_borders_of_phases(actual: TreebankResult) -> None:
    lines = sizes_figure(actual).data
    assert np.nanmean(np.array(lines[0].y)) > 0
    expected = smooth(actual.timeline.size * actual.timeline.rate)
    assert list(lines[1].y) == pytest.approx(expected.tolist())
    side = Side(True, 0.01, 1.0, 5)
    marked = replace(actual.timeline.phases, warm_up=side, ascent=replace(side, boundary=7))
    shown = sizes_figure(replace(actual, timeline=replace(actual.timeline, phases=marked)))
    assert [(line.x0, line.x1) for line in shown.layout.shapes] == [(5, 5), (7, 7)]
    assert not sizes_figure(actual).layout.shapes


def test_each_third_has_a_line_over_the_checkpoints(actual: TreebankResult) -> None:
    lines = faded_figure(actual).data
    assert [line.name for line in lines] == ["early", "middle", "late"]
    assert all(list(line.x) == list(actual.evolution.checkpoints) for line in lines)
    assert np.array_equal(np.array(lines[2].y, dtype=float), actual.faded[2], equal_nan=True)


def test_examples_show_ours_after_each_epoch_and_the_influence_function_after_the_last(actual: TreebankResult) -> None:
    page = examples_page(actual)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles == 3 * [f"{OURS}, after epoch 1", f"{OURS}, after epoch 2", f"{FUNCTION}, after epoch 2"]
    assert page.count('class="text own"') >= 3
    assert page.count("mattered most") == 3 * 2 * 3, "the influence function knows no step"
    assert "<mark>" in page
    assert "This page contains training data" in page


def test_pages_say_what_retraining_found(actual: TreebankResult) -> None:
    told = [Proof("a", "a", True, 0.1, 2.0), Proof("a", "x", False, 0.3, 1.0)]
    made = pages(replace(actual, proofs=told))
    for name in ("copies.html", "examples.html"):
        assert "+2 nats at the median, where ours says +0.1" in made[name]
        assert "worth more in 1 of the 1 cases" in made[name]
        assert "Retraining" not in pages(actual)[name]


def test_text_is_only_text(actual: TreebankResult) -> None:
    hit = {"id": "x", "text": "<script>alert(1) <unk>", "influence": 0.5, "step": 3, "own": False, "common": []}
    named = {"epoch": 2, "method": OURS, "rank": 7.0, "best": [hit]}
    hostile = {"id": "y", "text": "<b>bold", "named": [named]}
    actual.examples.append(hostile)
    try:
        page = examples_page(actual)
    finally:
        actual.examples.remove(hostile)
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;unk&gt;" in page
    assert "original: rank 7" in page
    assert "+0.5, mattered most at step 3" in page
