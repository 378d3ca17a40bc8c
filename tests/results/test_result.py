"""Results and runs show themselves: in a notebook, where every text is escaped, and as plain values."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.results.test_influence import answer

import backstory
from backstory.errors import UnsupportedError, UsageError
from backstory.results.influence import Hit
from backstory.results.quality import Quality
from backstory.results.result import frame, plain, show_table

HOSTILE = "<script>alert(1)</script>"


def test_every_text_is_escaped() -> None:
    actual = show_table(HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE]}), [HOSTILE])
    assert HOSTILE not in actual
    assert actual.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4


def test_a_long_table_says_how_long_it_is() -> None:
    actual = show_table("long", pd.DataFrame({"x": range(1234)}))
    assert "10 of 1,234 rows shown" in actual
    assert actual.count("<tr") == 11


def test_an_answer_shows_both_ends_with_words() -> None:
    actual = answer(caveats=(HOSTILE,))._repr_html_()
    assert actual is not None
    assert "mean of 2 queries" in actual
    assert actual.index("<td>9</td>") < actual.index("<td>8</td>") < actual.index("<td>10</td>")  # +1.5, +0.75, −1
    assert actual.count("<td>9</td>") == 1
    assert "helped: without it the loss would be higher" in actual
    assert "hurt: without it the loss would be lower" in actual
    assert "positive: the sample helped" in actual
    assert HOSTILE not in actual


def test_an_answer_of_the_best_alone_shows_occurrences() -> None:
    scores, names = torch.tensor([[2.0, -1.0]], dtype=torch.float64), np.array([[HOSTILE, "b"]])
    actual = answer(
        scores=scores, sample_ids=names, steps=np.array([[3, 4]]), id_kind="str", complete=False, best=1
    )._repr_html_()
    assert actual is not None
    assert "query 1 of 1" in actual
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
    poor = answer(caveats=("mind this",), quality=Quality(steps=9, curvature="empirical"))
    for text in (repr(poor), poor._repr_html_() or ""):
        assert "mind this" in text
        assert "Recording quality: fair. Curvature is the empirical Fisher" in text
        assert "Early steps are understated" in text
        assert text.count("Curvature is the empirical Fisher") == 1
    assert poor.as_dict()["quality"]["verdict"] == "fair"


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
        with pytest.raises(UnsupportedError, match=r"pip install 'backstory\["):
            make()
