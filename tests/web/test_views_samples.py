"""Samples, and the life of one: what it helped, hurt, when, and what erased it."""

from pathlib import Path

import pytest
from tests.web.recipes import RECIPE, TERMS, TEXTS, recipe

import backstory
from backstory import insight
from backstory.web import views_samples
from backstory.web.errors import Refused
from backstory.web.state import Opened
from backstory.web.views_samples import life, samples


def test_pages_of_samples(opened: Opened) -> None:
    whole = [s.id for s in samples(opened).items]
    assert whole == sorted(TEXTS)
    parts = [samples(opened, page=n, per=4) for n in (1, 2, 3)]
    assert [s.id for part in parts for s in part.items] == whole
    assert [part.total for part in parts] == [9] * 3
    for page, per, last in ((4, 4, 3), (10**7, 200, 1)):
        with pytest.raises(Refused, match=f"found {page}; expected at most {last}, for 9 samples fit") as error:
            samples(opened, page=page, per=per)
        assert error.value.code == 404
    assert samples(opened, text="nothing like this").items == []
    assert parts[0].sources == ["law", "odd", "poems"]
    assert parts[0].items[0].value is None


def test_steps_the_wrong_way_round_are_refused(opened: Opened) -> None:
    with pytest.raises(Refused, match="first_step \\(from step\\) 9 after last_step \\(to step\\) 3") as error:
        samples(opened, first_step=9, last_step=3)
    assert error.value.code == 422
    assert samples(opened, first_step=3, last_step=3).total == 3


def test_values_are_influences_on_the_mean_loss(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    ids, scores = run.query(run.load_weights(made.model), made.loss, made.queries["poems"]).per_sample()
    expected = dict(zip(ids, scores.mean(0).tolist(), strict=True))
    found = samples(opened, sort="value", queries="poems")
    assert {s.id: s.value for s in found.items} == pytest.approx(expected, rel=1e-3)
    values = [s.value or 0.0 for s in found.items]
    assert values == sorted(values)


def test_samples_between_two_values(opened: Opened) -> None:
    whole = samples(opened, sort="value", queries="poems").items
    low, high = whole[2].value, whole[5].value
    for least, most, expected in ((low, high, whole[2:6]), (low, None, whole[2:]), (None, high, whole[:6])):
        found = samples(opened, sort="value", queries="poems", min_value=least, max_value=most)
        assert [s.id for s in found.items] == [s.id for s in expected]
        assert found.total == len(expected)
    assert samples(opened, queries="poems", min_value=high, max_value=low).items == []
    for least, most in ((0.0, None), (None, 0.0)):
        with pytest.raises(Refused, match="found no queries") as error:
            samples(opened, sort="value", min_value=least, max_value=most)
        assert error.value.code == 422


def test_the_life_of_a_sample(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    found = life(opened, "law/1/0", "poems", erasers=True)
    rows = run.store.read(0, 72, samples=True)
    assert rows.rows is not None
    own = [i for i, name in enumerate(rows.samples or []) if name == "law/1/0"]
    assert [o.step for o in found.occurrences] == [int(rows.step[i]) for i in own]
    assert [o.norm for o in found.occurrences] == pytest.approx([float(rows.rows[i].norm()) for i in own], rel=1e-5)
    for point in found.evolution:
        answer = run.query(run.load_weights(made.model, point.at), made.loss, made.queries["poems"], point.at)
        assert point.influence == pytest.approx(float(answer.sum_over(["law/1/0"]).mean()), rel=1e-3)
    each = run.query(run.load_weights(made.model), made.loss, made.queries["poems"]).sum_over(["law/1/0"]).tolist()
    told = {q.index: q.influence for q in [*found.helped, *found.hurt]}
    assert told == pytest.approx({i: x for i, x in enumerate(each) if x != 0}, rel=1e-3)
    assert all(q.influence > 0 for q in found.helped)
    assert all(q.influence < 0 for q in found.hurt)
    assert [o.influence for o in found.occurrences]
    assert found.sample.value == pytest.approx(sum(o.influence or 0.0 for o in found.occurrences))


def test_what_erased_a_sample(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    expected = insight.overwriting(run, run.load_weights(made.model), made.loss, made.queries["law"], "tags")
    found = life(opened, "tags", None, erasers=True)
    assert found.erased_by is not None
    assert [(e.sample.id, e.step) for e in found.erased_by] == [
        (e.sample, e.step) for e in expected.overwritten_by[:20]
    ]
    rounding = TERMS * 2**-24
    assert found.lost == pytest.approx(expected.lost, rel=rounding, abs=rounding * abs(expected.just_after))
    assert found.saturation is not None
    terms = found.saturation
    left = terms.just_after + terms.momentum - terms.erased - terms.decay
    assert terms.left == pytest.approx(left, rel=1e-6, abs=1e-9)
    assert life(opened, "tags", None, erasers=False).erased_by is None


def test_neighbours_are_others_and_closest_first(opened: Opened) -> None:
    found = life(opened, "law/1/0", None, erasers=False).neighbours
    assert "law/1/0" not in [n.sample.id for n in found]
    assert len(found) == 8
    nearest = [n.similarity for n in found]
    assert nearest == sorted(nearest, reverse=True)
    assert all(-1 <= x <= 1 for x in nearest)


def test_life_without_a_recipe_shows_what_needs_no_model(untrusted: Opened) -> None:
    found = life(untrusted, "tags", None, erasers=True)
    assert (found.queries, found.evolution, found.helped, found.erased_by) == (None, [], [], None)
    assert all(o.influence is None and o.norm for o in found.occurrences)
    assert len(found.neighbours) == 8
    assert any("--trust-recipe" in note for note in found.notes)
    with pytest.raises(Refused, match="without a model"):
        life(untrusted, "tags", "law", erasers=False)


def test_life_without_embeddings(bare_run: Path) -> None:
    found = life(Opened(bare_run, RECIPE), "tags", None, erasers=False)
    assert found.neighbours == []
    assert len(found.evolution) == 3
    assert len(found.helped) + len(found.hurt) == 2


def test_queries_in_a_few_words(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    assert views_samples.label(opened, "law", 1) == "law 1: that judge he"
    monkeypatch.setattr(views_samples, "shown_queries", lambda *_: [{"label": 7}])
    assert views_samples.label(opened, "law", 0) == "law 0: label 7"
    monkeypatch.setattr(views_samples, "shown_queries", lambda *_: [])
    assert views_samples.label(opened, "law", 1) == "law 1"
