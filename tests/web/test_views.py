"""The run as a whole: shapes say what the library says."""

import csv
import io
from functools import partial

import pytest
from tests.web.recipes import STEPS, TERMS, recipe

import backstory
from backstory import insight
from backstory.web import views
from backstory.web.errors import Refused
from backstory.web.state import Opened


def test_the_overview(opened: Opened) -> None:
    found = views.overview(opened)
    assert (found.steps, found.occurrences, found.samples) == (24, 72, 9)
    assert (found.checkpoints, found.optimizer, found.curvature) == ([8, 16, 24], "SGD", "empirical/6")
    assert [(s.name, s.count) for s in found.query_sets] == [("law", 2), ("poems", 2)]
    assert (found.can_type, found.can_upload, found.can_shade) == (True, True, True)
    assert len(found.loss) == STEPS
    assert all(x is not None and x > 0 for x in found.loss)
    assert found.quality.words == list(backstory.open(opened.run.path).quality().words)
    assert found.timeline is not None
    assert found.timeline.queries == "law"
    assert found.created is not None


def test_the_overview_without_a_recipe(untrusted: Opened) -> None:
    found = views.overview(untrusted)
    assert (found.timeline, found.default_queries, found.can_type, found.can_shade) == (None, None, False, False)
    assert "--trust-recipe" in found.missing[0]
    assert found.quality.words


def test_the_timeline_has_null_where_there_is_no_number(opened: Opened) -> None:
    found = views.timeline(opened, "poems", 16)
    assert (found.queries, found.at, len(found.per_rate)) == ("poems", 16, 16)
    assert views.numbers([1.0, float("nan"), -float("inf")]) == [1.0, None, None]
    assert views.plain({"a": [float("nan"), 2], "b": (1.5,)}) == {"a": [None, 2], "b": [1.5]}
    assert views.phases(opened, "poems", 16) == found.phases


def test_sources_are_those_of_insight(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    expected = insight.sources(run, run.load_weights(made.model), made.loss, made.queries)
    _, found = views.sources(opened, ["law", "poems"], None, None)
    assert [s.name for s in found.sources] == list(expected.sources)
    near = partial(pytest.approx, rel=TERMS * 2**-24, abs=TERMS * 2**-24 * float(abs(expected.matrix).max()))
    assert [s.value for s in found.sources] == near([v.value for v in expected.total])
    assert [s.low for s in found.sources] == near([v.low for v in expected.total])
    assert found.matrix == [near(line) for line in expected.matrix.tolist()]
    assert (found.by, found.domains) == ("source", ["law", "poems"])
    assert views.sources(opened, None, "label", None)[1].by == "label"


def test_where_nobody_names_query_sets_sources_are_valued_for_all_domains(opened: Opened) -> None:
    assert views.sources(opened, None, None, None)[1] == views.sources(opened, ["law", "poems"], None, None)[1]


def test_sources_as_a_table_hold_no_formula(opened: Opened) -> None:
    found, shape = views.sources(opened, ["law", "poems"], None, None)
    lines = list(csv.reader(io.StringIO(views.sources_csv(found))))
    assert lines[0] == ["source", "samples", "value", "low", "high", "law", "poems"]
    assert [line[0] for line in lines[1:]] == [s.name for s in shape.sources]
    assert [float(line[2]) for line in lines[1:]] == [s.value for s in shape.sources]
    assert views._cell("=1+1") == "'=1+1"
    assert views._cell("law") == "law"


def test_harmful_samples_are_negative_and_lowest_first(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    expected = insight.harmful(run, run.load_weights(made.model), made.loss, made.queries["law"], top=9).harmful
    found = views.harmful(opened, None, 9, None)
    below = [s for s in expected if s.influence < 0]
    assert [h.sample.id for h in found.items] == [s.sample for s in below]
    assert [h.influence for h in found.items] == pytest.approx([s.influence for s in below], rel=1e-3)
    assert len(views.harmful(opened, None, 1, None).items) == 1


def test_uses_in_the_last_steps_can_be_left_out(opened: Opened) -> None:
    whole, part = views.harmful(opened, None, 9, None), views.harmful(opened, None, 9, None, 10)
    scores, catalogue = opened.mean("law", 24).scores[0], opened.catalogue
    early = catalogue.steps < 14
    for h in part.items:
        rows = catalogue.rows(catalogue.number(h.sample.id))
        assert h.influence == pytest.approx(scores[rows[early[rows]]].sum(), abs=1e-6 * abs(scores).max())
    assert [h.influence for h in part.items] != [h.influence for h in whole.items]
    assert (part.without_last, whole.without_last, whole.late_from) == (10, 0, 22)
    assert whole.late == sum(h.sample.steps[-1] >= 22 for h in whole.items)
    for wrong in (24, -1):
        with pytest.raises(Refused, match=f"found {wrong}; expected 0 to 23"):
            views.harmful(opened, None, 9, None, wrong)


def test_every_answer_says_how_far_to_trust_it(opened: Opened) -> None:
    for found in (
        views.overview(opened),
        views.harmful(opened, None, 3, None),
        views.sources(opened, None, None, 16)[1],
    ):
        assert found.quality.verdict in ("good", "fair", "weak")
        assert found.quality.reason
        assert "Early steps are understated" in found.quality.early


def test_cells_whose_interval_includes_zero_are_not_clear(opened: Opened) -> None:
    inner, found = views.sources(opened, ["law", "poems"], None, None)
    assert found.clear == [[not c.low <= 0 <= c.high for c in line] for line in inner.cells]
    for s in found.sources:
        assert s.words == ("not clear" if s.low <= 0 <= s.high else "helps" if s.value > 0 else "hurts")


def test_a_run_without_sources_says_so(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened.catalogue, "has", opened.catalogue.has.model_copy(update={"source": False}))
    assert views.sources(opened, None, None, None)[1].by == "label"
    with pytest.raises(Refused, match="holds no source"):
        views.sources(opened, None, "source", None)
