"""Runs and answers in a notebook: a table in HTML in which every text is escaped."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from backstory.results.notebook import shown
from tests.results.test_influence import answer

import backstory

HOSTILE = "<script>alert(1)</script>"


def test_every_text_is_escaped() -> None:
    found = shown(HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE]}), [HOSTILE])
    assert HOSTILE not in found
    assert found.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4


def test_a_long_table_says_how_long_it_is() -> None:
    found = shown("long", pd.DataFrame({"x": range(1234)}))
    assert "1,234 rows, of which 10 are shown" in found
    assert found.count("<tr") == 11


def test_an_answer_shows_both_ends_with_words() -> None:
    found = answer(notes=(HOSTILE,))._repr_html_()
    assert found is not None
    assert "the mean of 2 queries" in found
    assert found.index("<td>9</td>") < found.index("<td>8</td>") < found.index("<td>10</td>")  # +1.5, +0.75, −1
    assert found.count("<td>9</td>") == 1
    assert "helped: without it the loss would be higher" in found
    assert "hurt: without it the loss would be lower" in found
    assert "positive: the sample helped" in found
    assert HOSTILE not in found


def test_an_answer_of_the_best_alone_shows_occurrences() -> None:
    scores, names = torch.tensor([[2.0, -1.0]], dtype=torch.float64), np.array([[HOSTILE, "b"]])
    found = answer(
        scores=scores, sample_ids=names, steps=np.array([[3, 4]]), id_kind="str", complete=False, kept=1
    )._repr_html_()
    assert found is not None
    assert "query 1 of 1" in found
    assert "&lt;script&gt;" in found
    assert HOSTILE not in found


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
    found = run._repr_html_()
    assert found is not None
    assert "&lt;b&gt;run" in found
    assert "<td>SGD</td>" in found
    assert "4 full dimensions" in found
    assert "<td>few</td>" in found
    assert "<b>" not in found


def test_without_pandas_the_plain_words_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert answer()._repr_html_() is None
