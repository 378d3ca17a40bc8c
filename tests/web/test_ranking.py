"""Both ends of a ranking, against sorting everything."""

from collections import defaultdict

import numpy as np
import pytest

from backstory.web import ranking
from backstory.web.schemas import HELPED, HURT
from backstory.web.state import Opened


def summed(opened: Opened, scores: np.ndarray) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for i, x in enumerate(scores):
        out[opened.catalogue.ids[opened.catalogue.inverse[i]]] += float(x)
    return out


@pytest.mark.parametrize(("n", "k"), [(72, 3), (72, 9), (72, 50), (7, 3), (7, 1)])
def test_both_ends(opened: Opened, n: int, k: int) -> None:
    scores = np.random.default_rng(n).standard_normal(n)
    expected = sorted(summed(opened, scores).items(), key=lambda item: -item[1])
    helpful, harmful = ranking.both(scores, opened.catalogue, k, None)
    assert [h.sample.id for h in helpful] == [name for name, _ in expected[:k]]
    assert [h.sample.id for h in harmful] == [name for name, _ in expected[::-1][:k]]
    assert [h.influence for h in helpful] == pytest.approx([x for _, x in expected[:k]])
    found = ranking.ranking(scores, opened.catalogue, k, 5)
    assert (found.helpful, found.harmful) == ([h.sample.id for h in helpful], [h.sample.id for h in harmful])


def test_samples_that_were_not_used_yet_are_left_out(opened: Opened) -> None:
    helpful, harmful = ranking.both(np.array([-1.0, -2.0, -3.0]), opened.catalogue, 9, None)
    first = {opened.catalogue.ids[j] for j in opened.catalogue.inverse[:3]}
    assert {h.sample.id for h in helpful} == {h.sample.id for h in harmful} == first
    assert all(h.occurrences == 1 for h in helpful)


def test_a_hit_says_where_it_mattered_most_and_its_words(opened: Opened) -> None:
    scores = np.zeros(72)
    j = opened.catalogue.number("law/1/0")
    rows = opened.catalogue.rows(j)
    scores[rows[2]], scores[rows[4]] = -3.0, 2.0
    (worst,) = ranking.both(scores, opened.catalogue, 1, "The COURT is held in a house, the end")[1]
    assert (worst.step, worst.influence, worst.words) == (int(opened.catalogue.steps[rows[2]]), -1.0, HURT)
    assert (worst.occurrences, worst.common) == (len(rows), ["court"])  # short words are in almost any text
    assert ranking.words(0.5) == HELPED
    assert ranking.words(0.0) == "had no influence"


def test_the_last_uses_are_left_out(opened: Opened) -> None:
    scores = np.arange(len(opened.catalogue.steps), dtype=float)
    found = ranking.without_last(scores, opened.catalogue, 24, 4)
    assert len(found) == int((opened.catalogue.steps < 20).sum())
    assert ranking.without_last(scores, opened.catalogue, 24, 0) is scores
    hit = ranking.both(scores, opened.catalogue, 1, None)[0][0]
    assert ranking.last_use(hit, 24) == hit.sample.steps[-1]
    assert ranking.last_use(hit, hit.sample.steps[-1]) == hit.sample.steps[-2]


def test_the_pace_sums_each_step(opened: Opened) -> None:
    scores = np.random.default_rng(0).standard_normal(72)
    found = ranking.pace(scores, opened.catalogue, 24)
    assert found.influence == pytest.approx(scores.reshape(24, 3).sum(1).tolist())
    assert found.size == pytest.approx(np.abs(scores).reshape(24, 3).mean(1).tolist())
    assert found.steps == list(range(24))
