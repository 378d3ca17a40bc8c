"""The ends of the ranking, with content."""

import pytest
from tests.insight.runs import SOURCES, Small, loss

from backstory.insight.harmful import harmful


def test_lowest_first_with_what_the_run_holds_of_them(plain: Small) -> None:
    found = harmful(plain.run, plain.model, loss, plain.queries, k=3)
    ids, scores = plain.run.query(plain.model, loss, plain.queries).per_sample()
    means = dict(zip(ids, scores.mean(0).tolist(), strict=True))
    ranked = sorted(means, key=lambda i: means[i])
    assert [s.sample for s in found.harmful] == ranked[:3]
    assert [s.sample for s in found.helpful] == ranked[::-1][:3]
    for s in (*found.harmful, *found.helpful):
        assert s.influence == pytest.approx(means[s.sample], rel=1e-9)
        assert isinstance(s.sample, int)
        assert s.source == SOURCES[s.sample % 3]
        assert s.text == f"sample {s.sample} likes {s.source}"
        assert s.label == str(s.sample % 2)


def test_common_words_of_a_text_are_marked(plain: Small) -> None:
    shown = harmful(plain.run, plain.model, loss, plain.queries, k=1).helpful[0]
    assert [p.text for p in shown.marked("who likes WHAT") if p.common] == ["likes"]


def test_an_answer_in_plain_values(plain: Small) -> None:
    found = harmful(plain.run, plain.model, loss, plain.queries, k=2)
    told = found.as_dict()
    assert told["harmful"][0]["text"] == found.harmful[0].text
    assert told["sign"].startswith("positive")
    assert len(found.to_pandas()) == 4
    assert len(found.figure().data) == 2


def test_every_answer_says_how_far_to_trust_it(plain: Small) -> None:
    found = harmful(plain.run, plain.model, loss, plain.queries)
    assert any("modelled exactly" in note for note in found.caveats)
    assert any("eval mode" in note for note in found.caveats)
