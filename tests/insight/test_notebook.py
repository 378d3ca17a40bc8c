"""Insight results in a notebook: their table, the sign and the notes, all escaped; figures are Plotly's own objects."""

import sys
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from tests.insight.runs import Small
from tests.support.loops import batch_of, cross_entropy

from backstory import insight
from backstory.insight.harmful import Extremes, Shown

HOSTILE = "<script>alert(1)</script>"
MADE: dict[str, Any] = {
    "timeline": lambda s: insight.timeline(s.run, s.model, cross_entropy, s.queries),
    "evolution": lambda s: insight.evolution(s.run, s.model, cross_entropy, s.queries),
    "saturation": lambda s: insight.saturation(s.run, s.model, cross_entropy, s.queries, 3),
    "memorisation": lambda s: insight.memorisation(s.run, s.model, cross_entropy, batch_of([3]), [3]),
    "sources": lambda s: insight.sources(s.run, s.model, cross_entropy, {"all": s.queries}, draws=40),
    "harmful": lambda s: insight.harmful(s.run, s.model, cross_entropy, s.queries),
    "analytic": lambda s: insight.analytic(s.run),
}


@pytest.mark.parametrize("name", MADE)
def test_results_render_themselves(name: str, plain: Small) -> None:
    found = MADE[name](plain)
    html = found._repr_html_()
    table = found.to_pandas()
    assert isinstance(table, pd.DataFrame)
    assert all(f"<th>{column}</th>" in html for column in table.columns)
    sign = "<li>positive: the sample helped, removing it would raise the query&#x27;s loss</li>"
    assert (sign in html) == (name != "analytic")
    assert isinstance(found.figure(), go.Figure)


def test_the_timeline_begins_with_its_phases(plain: Small) -> None:
    found = MADE["timeline"](plain)
    assert f"Phases: {found.phases.words}" in found._repr_html_()


def test_text_of_samples_is_escaped() -> None:
    shown = Shown(HOSTILE, -1.0, 2, 1, text=HOSTILE, label=HOSTILE, source=HOSTILE)
    html = Extremes(3, (shown,), (), notes=(HOSTILE,))._repr_html_()
    assert html is not None
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 5


def test_without_pandas_the_plain_words_are_printed(plain: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    found = MADE["harmful"](plain)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert found._repr_html_() is None
