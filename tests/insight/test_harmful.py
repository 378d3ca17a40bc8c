"""The ends of the ranking, with content."""

import pytest
from tests.insight.runs import SOURCES, STEPS, Small, loss
from tests.support.loops import ids_of

from backstory.errors import UsageError
from backstory.insight import Harmful, RankedSample, harmful


def test_lowest_first_with_what_the_run_holds_of_them(plain: Small) -> None:
    actual = harmful(plain.run, plain.model, loss, plain.queries, top=3)
    ids, scores = plain.run.query(plain.model, loss, plain.queries).per_sample()
    means = dict(zip(ids, scores.mean(0).tolist(), strict=True))
    ranked = sorted(means, key=lambda i: means[i])
    assert [s.sample for s in actual.harmful] == ranked[:3]
    assert [s.sample for s in actual.helpful] == [i for i in ranked[::-1][:3] if means[i] > 0]
    for s in (*actual.harmful, *actual.helpful):
        assert s.influence == pytest.approx(means[s.sample], rel=1e-9)
        assert isinstance(s.sample, int)
        assert s.source == SOURCES[s.sample % 3]
        assert s.text == f"sample {s.sample} likes {s.source}"
        assert s.label == str(s.sample % 2)


def test_only_what_hurts_is_harmful_and_late_uses_can_be_left_out(plain: Small) -> None:
    every = harmful(plain.run, plain.model, loss, plain.queries, top=99)
    assert len(every.harmful) + len(every.helpful) == 9
    assert all(s.influence < 0 for s in every.harmful)
    assert all(s.influence > 0 for s in every.helpful)
    early = harmful(plain.run, plain.model, loss, plain.queries, top=99, without_last=4)
    answer = plain.run.query(plain.model, loss, plain.queries)
    for s in (*early.harmful, *early.helpful):
        assert s.influence == pytest.approx(float(answer.sum_over([s.sample], steps=range(STEPS - 4)).mean()), rel=1e-9)
        assert s.last == max(t for t in range(STEPS - 4) if s.sample in ids_of(t))
    assert "left out" in " ".join(early.words)
    with pytest.raises(UsageError, match=f"between 0 and {STEPS - 1}"):
        harmful(plain.run, plain.model, loss, plain.queries, without_last=STEPS)


def test_how_many_of_the_harmful_came_late() -> None:
    some = tuple(RankedSample(k, 100, -1.0, 1, last) for k, last in enumerate((107, 108, 110, 119)))
    (words,) = Harmful(some, (), at=120).words
    assert "3 of these 4 samples were last used in the last tenth of training (from step 108)" in words
    assert Harmful((), (), at=120).words == ()
    assert "This sample was not last used" in Harmful(some[:1], (), at=120).words[0]


def test_it_prints_its_samples_as_a_query_prints_its_hits(plain: Small) -> None:
    actual = harmful(plain.run, plain.model, loss, plain.queries, top=2)
    best, worst = plain.run.query(plain.model, loss, plain.queries).hits(2)
    assert list(actual.preview()) == ["sample", "label", "source", "step", "influence", "text"]
    assert actual.lines() == (*map(str, worst), *map(str, best))


def test_an_answer_in_plain_values(plain: Small) -> None:
    actual = harmful(plain.run, plain.model, loss, plain.queries, top=2)
    told = actual.as_dict()
    assert told["harmful"][0]["text"] == actual.harmful[0].text
    assert told["sign"].startswith("positive")
    assert len(actual.to_pandas()) == len(actual.harmful) + len(actual.helpful) == 3
    assert list(actual.drawings()) == ["harmful", "helpful"]
