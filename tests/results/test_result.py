"""Results and runs show themselves: in a notebook, where every text is escaped, and as plain values."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.results.test_influence import SCORES, answer

import backstory
from backstory.errors import UnsupportedError, UsageError
from backstory.results.influence import Hit
from backstory.results.origin import EXACT
from backstory.results.quality import Quality
from backstory.results.recording_report import RecordingReport
from backstory.results.result import frame, show_table
from backstory.results.row import plain

HOSTILE = "<script>alert(1)</script>"


def test_every_text_is_escaped() -> None:
    actual = show_table(HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE]}), [HOSTILE])
    assert HOSTILE not in actual
    assert actual.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4


def test_a_long_table_says_how_long_it_is() -> None:
    actual = show_table("long", pd.DataFrame({"x": range(1234)}))
    assert "10 of 1,234 rows shown" in actual
    assert actual.count("<tr") == 11


def test_an_answer_shows_both_ends_with_their_content() -> None:
    actual = answer(caveats=(HOSTILE,))._repr_html_()
    assert actual is not None
    assert "mean of 2 queries" in actual
    assert actual.index("<td>9</td>") < actual.index("<td>8</td>") < actual.index("<td>10</td>")  # +1.5, +0.75, −1
    assert actual.count("<td>9</td>") == 1
    assert re.findall(r"<th>(\w+)</th>", actual) == ["sample", "label", "source", "step", "influence"]
    assert "<td>book</td>" in actual
    assert actual.count("positive: the sample helped") == 1
    assert HOSTILE not in actual


def test_an_answer_of_the_best_alone_shows_occurrences() -> None:
    scores, names = torch.tensor([[2.0, -1.0]], dtype=torch.float64), np.array([[HOSTILE, "b"]])
    actual = answer(
        scores=scores, sample_ids=names, steps=np.array([[3, 4]]), id_kind="str", complete=False, best=1
    )._repr_html_()
    assert actual is not None
    assert "on 1 query at step 3 (method: reverse sweep)</strong>" in actual
    assert "&lt;script&gt;" in actual
    assert HOSTILE not in actual


def test_a_run_says_what_it_holds(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "<b>run"
    with backstory.record(model, optimizer, path, loss_reduction="mean", projection="full") as rec:
        with rec.step([1, 2]):
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
    run = backstory.open(path)
    run.add_queries("few", torch.ones(2, 3))
    actual = run._repr_html_()
    assert actual is not None
    assert "&lt;b&gt;run" in actual
    assert "<td>SGD</td>" in actual
    assert "4 (full)" in actual
    assert "<td>few</td>" in actual
    assert "<b>" not in actual


def test_without_pandas_the_plain_words_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert answer()._repr_html_() is None


def test_what_must_be_said_comes_with_the_numbers() -> None:
    judged, report = (
        Quality(command="backstory calibrate RUN --queries q"),
        RecordingReport(steps=9, curvature="empirical"),
    )
    poor = answer(caveats=("mind this",), quality=judged, recording=report)
    for text in (repr(poor), poor._repr_html_() or ""):
        assert "mind this" in text
        assert text.count("Curvature is the empirical Fisher") == 1
        assert text.count(judged.sentence) == 1
    assert poor.as_dict()["quality"]["sentence"] == judged.sentence
    assert poor.as_dict()["recording"]["words"] == list(report.words)


def test_the_sign_is_one_line_of_a_terminal() -> None:
    assert answer().brief == "+ helped, − hurt."
    exact = answer(method=EXACT).brief
    assert exact == "+ helped, − hurt. Exact, through the replayed training."
    assert len(f"{exact} 9 notes: --notes") <= 80


def test_the_printed_result_begins_with_its_hits() -> None:
    lines = repr(answer()).splitlines()
    assert (
        lines[0] == "Influence of 6 occurrences on 2 queries at step 3 (method: reverse sweep): the mean of 2 queries"
    )
    assert lines[1] == "  sample 9  source book  step 0  influence +1.50"
    assert lines[3] == "  sample 10  label a  source web  step 2  influence -1.00"
    assert sum("positive: the sample helped" in line for line in lines) == 1
    hurt = answer(scores=-SCORES[1:], quality=None)
    assert [int(line.split()[1]) for line in repr(hurt).splitlines()[1:4]] == [10, *(h.sample for h in hurt.bottom(2))]
    assert hurt.preview()["sample"] == [10, *(h.sample for h in hurt.bottom(2))]


def test_plain_values_have_no_numbers_that_json_lacks() -> None:
    value = {"a": np.array([1.0, np.nan]), "b": (torch.tensor([2]), float("inf")), 3: Hit(1, 0, 0.5)}
    assert plain(value) == {"a": [1.0, None], "b": [[2], None], "3": Hit(1, 0, 0.5).as_dict()}


def test_a_figure_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no figure 'pie'. It has: by_step"):
        answer().draw("pie")
    with pytest.raises(UsageError, match="this result has no figures"):
        answer(complete=False).draw()


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Callable[[], Any]]] = [("plotly", answer().figure), ("pandas", lambda: frame({}))]
    for package, make in made:
        for name in [n for n in sys.modules if n.split(".")[0] == package]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UnsupportedError, match=r"pip install '\.\["):
            make()
