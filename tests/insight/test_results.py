"""Insight results in a notebook: their table, the sign and the notes, all escaped; figures are Plotly's own objects."""

import json
import sys
from html import escape
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from tests.insight.runs import Small
from tests.support.loops import batch_of, cross_entropy

from backstory import insight
from backstory.insight import Harmful, RankedSample
from backstory.results.sign import SIGN

HOSTILE = "<script>alert(1)</script>"
MADE: dict[str, Any] = {
    "timeline": lambda s: insight.timeline(s.run, s.model, cross_entropy, s.queries),
    "evolution": lambda s: insight.evolution(s.run, s.model, cross_entropy, s.queries),
    "overwriting": lambda s: insight.overwriting(s.run, s.model, cross_entropy, s.queries, 3),
    "memorisation": lambda s: insight.memorisation(s.run, s.model, cross_entropy, batch_of([3]), [3]),
    "sources": lambda s: insight.sources(s.run, s.model, cross_entropy, {"all": s.queries}, draws=40),
    "harmful": lambda s: insight.harmful(s.run, s.model, cross_entropy, s.queries),
}


@pytest.mark.parametrize("name", MADE)
def test_results_render_themselves(name: str, plain: Small) -> None:
    actual = MADE[name](plain)
    html = actual._repr_html_()
    assert isinstance(actual.to_pandas(), pd.DataFrame)
    assert all(f"<th>{column}</th>" in html for column in actual.preview())
    assert f"<li>{escape(SIGN)}</li>" in html
    assert all(isinstance(actual.figure(drawn), go.Figure) for drawn in actual.drawings())
    assert actual.drawings()


@pytest.mark.parametrize("name", MADE)
def test_every_result_carries_what_must_be_said(name: str, plain: Small) -> None:
    actual = MADE[name](plain)
    sent = json.loads(json.dumps(actual.as_dict(), allow_nan=False))
    assert sent["sign"] == SIGN
    assert sent["unit"] == actual.unit
    assert sent["at"] == actual.at == plain.run.n_steps
    assert any("eval mode" in caveat for caveat in sent["caveats"])
    assert "SGD's steps are modelled exactly." in sent["recording"]["words"]
    assert sent["quality"]["sentence"] == actual.quality.sentence
    assert sent["quality"]["sentence"].startswith(
        "Quality: not measured. To measure how reliable the ranking is: `backstory calibrate"
    )
    assert (sent["headline"], sent["words"]) == (actual.headline, list(actual.words))
    assert "samples used early get too small an influence" in repr(actual)


def test_the_timeline_says_its_phases_once(plain: Small) -> None:
    timeline = MADE["timeline"](plain)
    assert timeline._repr_html_().count(escape(timeline.phases.words)) == 1
    assert repr(timeline).count(timeline.phases.words) == 1


def test_text_of_samples_is_escaped() -> None:
    worst = RankedSample(HOSTILE, 2, -1.0, 1, text=HOSTILE, label=HOSTILE, source=HOSTILE)
    html = Harmful((worst,), (), at=3, caveats=(HOSTILE,))._repr_html_()
    assert html is not None
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 5


def test_without_pandas_the_plain_words_are_printed(plain: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = MADE["harmful"](plain)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert actual._repr_html_() is None
