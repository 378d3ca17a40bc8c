"""The figures of the pages say what their shapes say, and Plotly's own checker accepts each of them."""

import pytest
from tests.results.test_figures import valid
from tests.web import examples

from backstory.results.figures import BARS
from backstory.web import figures
from backstory.web import schemas as shapes


def test_the_phases_are_shaded_and_named() -> None:
    drawn = figures.timeline(examples.timeline())
    boxes = [(s["x0"], s["x1"]) for s in drawn["layout"]["shapes"]]
    assert boxes == [(0, 20), (20, 90), (90, 120)]
    assert [a["text"] for a in drawn["layout"]["annotations"]] == ["warm-up", "basin", "ascent"]
    assert drawn["data"][0]["y"] == examples.timeline().per_rate
    assert len(valid(drawn).data) == 3


def test_without_phases_nothing_is_shaded() -> None:
    drawn = figures.timeline(examples.timeline(phases=examples.phases(present=False)))
    assert drawn["layout"]["shapes"] == drawn["layout"]["annotations"] == []


def test_one_far_step_does_not_flatten_the_timeline() -> None:
    near = [0.001 * (1 + k % 3) for k in range(200)]
    drawn = figures.timeline(examples.timeline(per_rate=[*near, -4.0], size=[*near, 0.01]))
    assert drawn["data"][0]["y"][-1] == -4.0
    assert -0.001 < drawn["layout"]["yaxis"]["range"][0] < 0
    assert (drawn["data"][-1]["x"], drawn["data"][-1]["customdata"]) == ([200], [-4.0])
    assert len(valid(drawn).data) == 4


def test_a_narrow_band_has_no_name() -> None:
    found = examples.phases()
    side = found.ascent.model_copy(update={"boundary": 22})
    drawn = figures.timeline(examples.timeline(phases=found.model_copy(update={"ascent": side})))
    assert [a["text"] for a in drawn["layout"]["annotations"]] == ["warm-up", "ascent"]
    assert len(drawn["layout"]["shapes"]) == 3


def test_losses_that_nobody_recorded_are_not_drawn() -> None:
    assert figures.loss([None, None]) is None
    assert figures.loss([]) is None
    drawn = figures.loss([2.0, 1.0])
    assert drawn is not None
    assert valid(drawn).data[0].y == (2.0, 1.0)


def test_the_pace_of_a_query_has_the_sign_in_colour() -> None:
    found = shapes.Pace(steps=[4, 5, 6], influence=[0.5, -0.25, 0.0], size=[0.1, 0.2, 0.3])
    drawn = figures.pace(found)
    assert drawn is not None
    assert (drawn["data"][0]["x"], drawn["data"][0]["y"]) == ([4, 5, 6], [0.5, -0.25, 0.0])
    assert drawn["data"][0]["marker"]["color"] == ["var(--helped)", "var(--hurt)", "var(--helped)"]
    assert [k["name"] for k in drawn["layout"]["meta"]["key"]][:2] == ["step helped", "step hurt"]
    assert figures.pace(shapes.Pace(steps=[], influence=[], size=[])) is None
    valid(drawn)


def test_a_long_pace_keeps_its_steps() -> None:
    drawn = figures.pace(shapes.Pace(steps=list(range(100, 740)), influence=[1.0] * 640, size=[1.0] * 640))
    assert drawn is not None
    assert len(drawn["data"][0]["x"]) == BARS
    assert drawn["data"][0]["x"][:2] == [101, 105]


def test_places_are_those_of_the_rankings_and_gaps_stay_gaps() -> None:
    at = [
        shapes.Ranking(at=40, helpful=["law/1", "old", "law/0", "third"], harmful=[]),
        shapes.Ranking(at=80, helpful=["law/1"], harmful=[]),
        shapes.Ranking(at=120, helpful=["law/0", "law/1"], harmful=[]),
    ]
    drawn = figures.places(
        [examples.hit(0, 0.5), examples.hit(1, 0.1), examples.hit(9, 0.1)], at, "helpful", "var(--ink)"
    )
    assert drawn is not None
    assert [t["y"] for t in drawn["data"]] == [[3, None, 1], [1, 1, 2], [2, None, None]]
    assert [t["text"] for t in drawn["data"]] == [["", "", "law/0"], ["", "", "law/1"], [""] * 3]
    assert [t["opacity"] for t in drawn["data"]] == [1, 1, 0.4]
    assert figures.places([examples.hit(9, 0.1)], at, "harmful", "var(--ink)") is None
    valid(drawn)


def test_the_life_of_a_sample_is_drawn() -> None:
    life = examples.saturated()
    drawn = [
        figures.evolution(life.evolution),
        figures.occurrences(life.occurrences),
        figures.erasers(life.erased_by or []),
    ]
    assert all(drawn)
    ys = [list(valid(f).data[0].y) for f in drawn]
    assert ys == [[0.04, 0.02, 0.015], [0.02, -0.005, 0.01], [f"law/{k}" for k in range(4)]]
    assert figures.evolution([]) is figures.occurrences([]) is figures.erasers([]) is None


def test_several_samples_are_followed_in_the_colour_of_their_sign() -> None:
    def values(*y: float | None) -> list[shapes.AtCheckpoint]:
        return [shapes.AtCheckpoint(at=40 * (k + 1), influence=x) for k, x in enumerate(y)]

    drawn = figures.followed({"law/0": values(0.3, 0.2), "<b>": values(None, -0.1)})
    assert drawn is not None
    assert [t["y"] for t in drawn["data"]] == [[0.3, 0.2], [None, -0.1]]
    assert [t["line"]["color"] for t in drawn["data"]] == ["var(--helped)", "var(--hurt)"]
    assert [k["name"] for k in drawn["layout"]["meta"]["key"]] == ["law/0", "&lt;b&gt;"]
    assert {t["mode"] for t in drawn["data"]} == {"lines+markers"}
    assert drawn["layout"]["xaxis"]["tickvals"] == [40, 80]
    assert figures.followed({}) is None
    valid(drawn)


def test_sources_have_intervals_and_links() -> None:
    drawn = figures.sources(examples.sources())
    assert drawn is not None
    reach, values = drawn["data"][0]["error_x"], drawn["data"][0]["x"]
    assert [v - m for v, m in zip(values, reach["arrayminus"], strict=True)] == pytest.approx([0.2, -0.1, -0.4])
    assert [v + m for v, m in zip(values, reach["array"], strict=True)] == pytest.approx([0.7, 0.4, 0.1])
    assert drawn["layout"]["meta"]["links"] == [f"/samples?source={k}" for k in range(3)]
    assert "<script" not in str(drawn)
    valid(drawn)


def test_a_source_whose_interval_includes_zero_is_grey() -> None:
    drawn = figures.sources(examples.sources())
    assert drawn is not None
    assert drawn["data"][0]["marker"]["color"] == ["var(--helped)", "var(--plain)", "var(--plain)"]
    cells = figures.matrix(examples.sources(clear=[[True, False], [False, True], [True, False]]))
    assert cells is not None
    assert cells["data"][0]["z"] == examples.sources().matrix
    assert cells["data"][1]["z"] == [[None, 0], [0, None], [None, 0]]
    assert "not clear" in cells["data"][1]["hovertemplate"]
    assert {colour for _, colour in cells["data"][1]["colorscale"]} == {"var(--plain)"}
    valid(cells)


def test_labels_that_are_numbers_have_their_word() -> None:
    found = examples.sources(
        by="label", sources=[s.model_copy(update={"name": "2"}) for s in examples.sources().sources]
    )
    for drawn in (figures.sources(found), figures.matrix(found)):
        assert drawn is not None
        assert drawn["data"][0]["y"] == ["label 2"] * 3


def test_the_matrix_is_drawn_around_zero() -> None:
    drawn = figures.matrix(examples.sources())
    assert drawn is not None
    assert drawn["data"][0]["z"] == examples.sources().matrix
    assert (drawn["data"][0]["zmin"], drawn["data"][0]["zmax"]) == (-0.5, 0.5)
    assert figures.matrix(examples.sources(domains=["law"], matrix=[[0.5], [0.1], [0.2]])) is None
    valid(drawn)


def test_bars_of_harm_lead_to_their_samples() -> None:
    drawn = figures.harmful(examples.harmful().items)
    assert drawn is not None
    assert drawn["layout"]["meta"]["links"] == [f"/samples/law%2F{k}" for k in range(4)]
    assert figures.harmful([]) is None
    valid(drawn)


def test_two_queries_are_compared_step_by_step() -> None:
    drawn = figures.compared(examples.answer().timeline, examples.answer().timeline)
    assert drawn is not None
    assert [t["name"] for t in drawn["data"]] == ["first query", "second query"]
    assert figures.compared(shapes.Pace(steps=[], influence=[], size=[]), examples.answer().timeline) is None
