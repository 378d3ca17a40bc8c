"""Figures as plain values: thinned curves, colours by name, and names that Plotly cannot take for markup."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import backstory
from backstory.results import figures as drawing
from backstory.results.figures import across, bars, bounded, figure, line, named, page, smoothed, thinned, to_plotly
from backstory.results.quality import Agreement, Quality


def valid(drawn: Any) -> go.Figure:
    """The figure as Plotly's own checker sees it; the page puts colours in place of their names."""
    text = re.sub(r'"var\(--[a-z-]+\)"', '"#123456"', json.dumps(drawn, allow_nan=False))
    return go.Figure(json.loads(text))


def test_a_short_curve_stays_as_it_is() -> None:
    assert thinned([1.0, None, 3.0]) == ([0, 1, 2], [1.0, None, 3.0])
    assert thinned([]) == ([], [])


def test_a_long_curve_is_drawn_as_means_over_equal_parts() -> None:
    y = np.random.default_rng(0).standard_normal(5000)
    places, values = thinned(y.tolist(), 100)
    assert values == pytest.approx(y.reshape(100, 50).mean(1).tolist())
    assert places == pytest.approx((np.arange(5000).reshape(100, 50).mean(1)).tolist())


def test_parts_of_unequal_length_hold_every_step_once() -> None:
    places, values = thinned([float(k) for k in range(1003)], 10)
    assert values == places  # the mean of consecutive numbers is the middle of their places
    ends = [-0.5]
    for place in places:  # a part reaches as far after its middle as before it
        ends.append(2 * place - ends[-1])
    assert ends == sorted(ends)
    assert ends[-1] == 1002.5


def test_what_is_not_known_is_left_out_of_means() -> None:
    assert thinned([1.0, None, None, None], 2)[1] == [1.0, None]
    assert smoothed([1.0, None, 3.0], 0.4) == [1.0, 2.0, 3.0]
    assert smoothed([None, None]) == [None, None]


def test_signs_have_colours() -> None:
    assert drawing.signed([1.0, -1.0, None]) == [drawing.HELPED, drawing.HURT, drawing.HELPED]


def test_names_hold_no_markup_and_are_short() -> None:
    assert named('<a href="x">y</a>') == '&lt;a href="x"&gt;y&lt;/a&gt;'
    assert named("x" * 100) == "x" * 27 + "…"


def test_several_lines_have_a_key_and_one_has_none() -> None:
    one, two = line([0], [1.0], "one", drawing.INK), line([0], [1.0], "two", drawing.WARM, dash="dot")
    assert figure([one], "x", "y", height=200)["layout"]["meta"]["key"] == []
    actual = figure([one, two], "x", "y", height=200)["layout"]["meta"]["key"]
    assert actual == [
        {"name": "one", "colour": drawing.INK, "dash": "solid"},
        {"name": "two", "colour": drawing.WARM, "dash": "dot"},
    ]


def test_plotly_accepts_what_is_drawn() -> None:
    lying = across(["a", "b"], [1.0, -2.0], "influence", error={"type": "data", "array": [1, 1]})
    assert lying["layout"]["meta"]["items"] == ["a", "b"]
    assert valid(lying).layout.height == 110 + 2 * 32
    assert len(valid(figure([bars([1, 2], [0.5, None], "%{y}")], "x", "y", height=200)).data) == 1


def test_an_axis_is_not_windowed_by_a_few_far_values() -> None:
    y = [0.5, 1.0, None, -0.5] * 100
    drawn = bounded(figure([line(range(400), y, "near", "var(--ink)")], "x", "y", height=100))
    assert "range" not in drawn["layout"]["yaxis"]
    y[3], y[7] = -90.0, 80.0
    drawn = bounded(figure([line(range(400), y, "far", "var(--ink)")], "x", "y", height=100))
    low, high = drawn["layout"]["yaxis"]["range"]
    assert -1 < low < -0.5 < 1 < high < 1.5
    marks = drawn["data"][1]
    assert (marks["x"], marks["customdata"]) == ([3, 7], [-90.0, 80.0])
    assert marks["marker"]["symbol"] == ["triangle-down", "triangle-up"]
    assert all(low < place < high for place in marks["y"])
    assert drawn["layout"]["meta"]["key"][-1]["name"] == "triangles: 2 off the scale, −90 to +80"
    assert drawn["layout"]["xaxis"]["range"] == [0, 399]
    valid(drawn)


def test_an_empty_curve_has_no_bounds() -> None:
    drawn = figure([line([], [], "none", "var(--ink)")], "x", "y", height=100)
    assert bounded(drawn) == drawn
    assert (
        "range"
        not in bounded(figure([line([0], [None], "none", "var(--ink)")], "x", "y", height=100))["layout"]["yaxis"]
    )


def test_a_notebook_gets_plain_colours_and_a_page_needs_no_network() -> None:
    two = [line([0, 1], [1.0, 2.0], name, colour) for name, colour in (("a", drawing.INK), ("b", drawing.WARM))]
    made = to_plotly(figure(two, "x", "y", height=200))
    assert "var(--" not in made.to_json()
    assert made.layout.showlegend
    text = page("a < b", "words & more", made)
    assert "a &lt; b" in text
    assert "words &amp; more" in text
    assert '<script src="http' not in text
    assert len(text) > 1_000_000, "Plotly's script is not in the page"


def test_colours_of_notebooks_are_those_of_the_page() -> None:
    style = (Path(backstory.__file__).parent / "web/static/style.css").read_text()
    for name, colour in drawing.COLOURS.items():
        assert f"{name[4:-1]}: light-dark({colour}," in style


def test_numbers_that_are_none_are_gaps() -> None:
    assert drawing.numbers(np.array([1.0, np.nan, np.inf])) == [1.0, None, None]
    drawn = drawing.timeline(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    assert drawn["data"][0]["y"] == [1.0, None]
    valid(drawn)


BANDS = [("fall", 0, 20), ("low", 20, 90), ("rise", 90, 120)]


def test_the_phases_are_shaded_and_named() -> None:
    y = [0.01 * (k % 5) for k in range(120)]
    drawn = drawing.timeline(y, y, BANDS, 120)
    assert [(s["x0"], s["x1"]) for s in drawn["layout"]["shapes"]] == [(0, 20), (20, 90), (90, 120)]
    assert [a["text"] for a in drawn["layout"]["annotations"]] == ["fall", "low", "rise"]
    assert drawn["data"][0]["y"] == y
    assert len(valid(drawn).data) == 3
    narrow = drawing.timeline(y, y, [*BANDS[:1], ("low", 20, 22), ("rise", 22, 120)], 120)
    assert [a["text"] for a in narrow["layout"]["annotations"]] == ["fall", "rise"]
    assert len(narrow["layout"]["shapes"]) == 3
    assert drawing.timeline(y, y)["layout"]["shapes"] == []


def test_one_far_step_does_not_flatten_the_timeline() -> None:
    near = [0.001 * (1 + k % 3) for k in range(200)]
    drawn = drawing.timeline([*near, -4.0], [*near, 0.01])
    assert drawn["data"][0]["y"][-1] == -4.0
    assert -0.001 < drawn["layout"]["yaxis"]["range"][0] < 0
    assert (drawn["data"][-1]["x"], drawn["data"][-1]["customdata"]) == ([200], [-4.0])


def test_losses_that_nobody_recorded_are_not_drawn() -> None:
    assert drawing.loss([None, float("nan")]) is drawing.loss([]) is None
    drawn = drawing.loss([2.0, 1.0])
    assert valid(drawn).data[0].y == (2.0, 1.0)


def test_the_timeline_of_a_query_has_the_sign_in_colour_and_keeps_its_steps() -> None:
    drawn = drawing.by_step([4, 5, 6], [0.5, -0.25, 0.0], [0.1, 0.2, 0.3])
    assert drawn is not None
    assert (drawn["data"][0]["x"], drawn["data"][0]["y"]) == ([4, 5, 6], [0.5, -0.25, 0.0])
    assert drawn["data"][0]["marker"]["color"] == ["var(--helped)", "var(--hurt)", "var(--helped)"]
    assert [k["name"] for k in drawn["layout"]["meta"]["key"]][:2] == ["step helped", "step hurt"]
    assert drawing.by_step([], [], []) is None
    valid(drawn)
    long = drawing.by_step(range(100, 740), [1.0] * 640, [1.0] * 640)
    assert long is not None
    assert (len(long["data"][0]["x"]), long["data"][0]["x"][:2]) == (drawing.BARS, [101, 105])


def test_places_are_those_of_the_rankings_and_gaps_stay_gaps() -> None:
    rankings = [["b", "old", "a", "third"], ["b"], ["a", "b"]]
    drawn = drawing.places(["a", "b", "x"], [40, 80, 120], rankings, "var(--ink)")
    assert drawn is not None
    assert [t["y"] for t in drawn["data"]] == [[3, None, 1], [1, 1, 2], [2, None, None]]
    assert [t["text"] for t in drawn["data"]] == [["", "", "a"], ["", "", "b"], [""] * 3]
    assert [t["opacity"] for t in drawn["data"]] == [1, 1, 0.4]
    assert drawing.places(["x"], [40], [[]], "var(--ink)") is None
    valid(drawn)


def test_several_samples_are_followed_in_the_colour_of_their_sign() -> None:
    drawn = drawing.evolution([40, 80], {"a": [0.3, 0.2], "<b>": [None, -0.1]}, signs=True)
    assert drawn is not None
    assert [t["y"] for t in drawn["data"]] == [[0.3, 0.2], [None, -0.1]]
    assert [t["line"]["color"] for t in drawn["data"]] == ["var(--helped)", "var(--hurt)"]
    assert [k["name"] for k in drawn["layout"]["meta"]["key"]] == ["a", "&lt;b&gt;"]
    assert {t["mode"] for t in drawn["data"]} == {"lines+markers"}
    assert drawn["layout"]["xaxis"]["tickvals"] == [40, 80]
    assert drawing.evolution([40], {}) is drawing.evolution([], {"a": []}) is None
    valid(drawn)


def test_uses_and_overwriters_are_bars() -> None:
    uses, later = drawing.occurrences([3, 9], [0.02, -0.005]), drawing.overwriters(["a"] * 12, [0.1] * 12)
    assert later is not None
    assert valid(uses).data[0].y == (0.02, -0.005)
    assert len(valid(later).data[0].x) == drawing.MOST_BARS == len(later["layout"]["meta"]["items"])
    assert drawing.occurrences([], []) is drawing.overwriters([], []) is None
    left = drawing.overwritten(np.array([0.0, 0.25, 0.5]), 1.0)
    assert left["data"][1]["y"] == [1.0, 0.75, 0.25]


def test_sources_have_intervals_and_are_grey_where_these_include_zero() -> None:
    rows, words = [(0.5, 0.2, 0.7), (-0.2, -0.5, 0.1)], ["helps", "not clear"]
    drawn = drawing.sources(["<web>", "books"], rows, words)
    assert drawn is not None
    reach = drawn["data"][0]["error_x"]
    assert (reach["arrayminus"], reach["array"]) == (pytest.approx([0.3, 0.3]), pytest.approx([0.2, 0.3]))
    assert drawn["data"][0]["marker"]["color"] == ["var(--helped)", "var(--plain)"]
    assert drawn["layout"]["meta"]["items"] == ["<web>", "books"]
    assert drawn["data"][0]["y"] == ["&lt;web&gt;", "books"]
    valid(drawn)


def test_the_matrix_is_drawn_around_zero_and_grey_where_it_is_not_clear() -> None:
    z = [[0.5, -0.1], [0.2, 0.3]]
    drawn = drawing.matrix(["a", "b"], ["law", "news"], z, [[True, False], [False, True]])
    assert drawn is not None
    assert (drawn["data"][0]["z"], drawn["data"][0]["zmin"], drawn["data"][0]["zmax"]) == (z, -0.5, 0.5)
    assert drawn["data"][1]["z"] == [[None, 0], [0, None]]
    assert "not clear" in drawn["data"][1]["hovertemplate"]
    assert {colour for _, colour in drawn["data"][1]["colorscale"]} == {"var(--plain)"}
    assert drawing.matrix(["a"], ["law"], [[0.5]], [[True]]) is None
    valid(drawn)


def test_a_ranking_names_its_samples() -> None:
    drawn = drawing.ranking(["a", "<b>"], [-0.2, -0.1])
    assert drawn is not None
    assert (drawn["data"][0]["x"], drawn["data"][0]["customdata"]) == ([1, 2], ["a", "&lt;b&gt;"])
    assert drawn["layout"]["meta"]["items"] == ["a", "<b>"]
    assert drawing.ranking([], []) is None
    valid(drawn)


def test_two_queries_are_compared_step_by_step() -> None:
    drawn = drawing.compared((range(3), [0.1, 0.2, 0.3]), (range(3), [0.0, 0.1, 0.0]))
    assert drawn is not None
    assert [t["name"] for t in drawn["data"]] == ["first query", "second query"]
    assert drawing.compared(([], []), (range(3), [0.0, 0.1, 0.0])) is None


def tenths(ranks: list[float | None], **more: Any) -> Quality:
    """A quality of 120 steps with these ranks."""
    parts = tuple(Agreement(12 * k, 12 * k + 12, rank, rank, rank, 9) for k, rank in enumerate(ranks))
    return Quality(on="here", whole=Agreement(0, 120, 0.7, 0.6, 0.8, 90), tenths=parts, **more)


RANKS = [0.3, -0.004, 0.55, 0.49, None, 0.8, 0.8, 0.9, 0.95, 1.0]


@pytest.mark.parametrize("kind", ["timeline", "by_step"])
def test_a_strip_below_the_time_axis_has_a_cell_for_each_tenth(kind: str) -> None:
    strip, y = drawing.strip(tenths(RANKS)), [0.01] * 120
    assert [weak for *_, weak in strip] == [True, True, False, True, *[False] * 6]
    drawn = (
        drawing.timeline(y, y, BANDS, 120, strip) if kind == "timeline" else drawing.by_step(range(120), y, y, strip)
    )
    assert drawn is not None
    cells = [x for x in drawn["layout"]["shapes"] if "label" in x]
    assert [(x["x0"], x["x1"]) for x in cells] == [(12 * k - 0.5, 12 * k + 11.5) for k in range(10)]
    assert [x["label"]["text"] for x in cells][:5] == [".30", ".00", ".55", ".49", "–"]
    assert cells[-1]["label"]["text"] == "1.0"
    outlined = [x["fillcolor"] == drawing.CLEAR for x in cells]
    assert outlined == [weak for *_, weak in strip]
    assert all(x["y1"] < x["y0"] < 0 and x["ysizemode"] == "pixel" for x in cells)
    assert drawn["layout"]["xaxis"]["ticklen"] > -cells[0]["y1"], "labels of the axis stand below the strip"
    valid(drawn)


def test_parts_that_are_not_ranked_are_grey_and_joined() -> None:
    drawn = drawing.by_step(range(120), [0.1] * 120, [0.1] * 120, drawing.strip(tenths(RANKS)))
    assert drawn is not None
    grey = [x for x in drawn["layout"]["shapes"] if "label" not in x]
    assert [(x["x0"], x["x1"], x["y0"], x["y1"]) for x in grey] == [(-0.5, 23.5, 0, 1), (35.5, 47.5, 0, 1)]
    assert [(k["name"], k["dash"]) for k in drawn["layout"]["meta"]["key"]][-2:] == [
        ("strip: quality, a rank correlation", "full"),
        ("outlined, grey above: below 0.50, not reliable", "open"),
    ]
    legend = [x.name for x in to_plotly(drawn).layout.shapes if x.showlegend]
    assert sorted(legend) == [
        "outlined, grey above: below 0.50, not reliable",
        "strip: quality, a rank correlation",
    ]


def test_a_run_that_is_ranked_throughout_has_no_grey_in_figure_and_key() -> None:
    drawn = drawing.graded(
        figure([line([0], [1.0], "one", drawing.INK)], "x", "y", height=200), drawing.strip(tenths([0.9] * 10))
    )
    assert all("label" in x for x in drawn["layout"]["shapes"])
    assert [k["dash"] for k in drawn["layout"]["meta"]["key"]] == ["full"]


def test_what_was_not_measured_and_what_is_exact_have_no_strip() -> None:
    for quality in (None, Quality(), tenths(RANKS, exact=True)):
        assert drawing.strip(quality) == ()
    plain = figure([line([0], [1.0], "one", drawing.INK)], "x", "y", height=200)
    assert drawing.graded(plain, ()) == figure([line([0], [1.0], "one", drawing.INK)], "x", "y", height=200)
