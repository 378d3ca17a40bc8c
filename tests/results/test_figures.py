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
    found = figure([one, two], "x", "y", height=200)["layout"]["meta"]["key"]
    assert found == [
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
    assert drawn["layout"]["meta"]["key"][-1]["name"] == "triangles: 2 beyond the edge, −90 to +80"
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
