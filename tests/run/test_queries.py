"""Query sets by name, of the run and of its recipe; batches of every kind have a size, and parts that together are the whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.insight.runs import loss, queries, small
from tests.support.loops import mlp, sgd

import backstory
from backstory.errors import StoreError, UsageError
from backstory.replay.queries import QuerySets, part, parts, size
from backstory.run.queries import open_queries

X, Y = torch.arange(20).reshape(10, 2), torch.arange(10)


def recipe() -> backstory.Recipe:
    model = mlp()
    return backstory.Recipe(model=model, optimizer=sgd(model), loss=loss, batches=[], queries={"test": queries()})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = small("sgd", tmp_path / "run")
    x, y = made.queries
    made.run.add_queries("few", (x[:2], y[:2]))
    monkeypatch.setattr("backstory.run.queries.load_recipe", lambda name, args: recipe())
    return tmp_path / "run"


def test_sets_of_the_run_and_of_the_recipe(run: Path) -> None:
    result = open_queries(run, ["few", "test"], "any:recipe", 8)
    assert result.at == 8
    assert list(result.batches) == ["few", "test"]
    assert (len(result.batches["few"][0]), len(result.batches["test"][0])) == (2, 4)
    expected = result.run.load_weights(mlp(), 8).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in result.model.state_dict().items())
    assert result.loss is loss


def test_one_query_of_a_set(run: Path) -> None:
    batches = open_queries(run, ["few:1", "test:3"], "any:recipe").batches
    x, y = queries()
    for selection, index in (("few:1", 1), ("test:3", 3)):
        assert torch.equal(batches[selection][0], x[index : index + 1])
        assert torch.equal(batches[selection][1], y[index : index + 1])


def test_a_query_is_described_by_its_label_prediction_and_loss(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_queries(run, ["few", "few:1"], "any:recipe")
    each = loss(plain.model, plain.batches["few"]).tolist()
    assert plain.describe("few:1") == f"Query few:1: loss {each[1]:.3g}."
    assert plain.describe("few") == f"Query set few: 2 queries, mean loss {sum(each) / 2:.3g}."
    page = backstory.Presentation(
        show=lambda batch: [{"label": f"class {v}"} for v in range(len(batch[1]))],
        predict=lambda model, batch: ["training" if model.training else "eval"],
    )
    shown = replace(recipe(), page=page)
    monkeypatch.setattr("backstory.run.queries.load_recipe", lambda name, args: shown)
    described = open_queries(run, ["few:1"], "any:recipe").describe("few:1")
    assert described == f"Query few:1: label class 0, predicted eval, loss {each[1]:.3g}."


def test_a_name_with_a_colon_is_a_name(run: Path) -> None:
    x, y = queries()
    named = replace(recipe(), queries={"test": (x, y), "test:0": (x[:3], y[:3])})
    sets = QuerySets(backstory.open(run), named)
    assert sets.parse("test:0") == ("test:0", None)
    assert sets.parse("test:0:2") == ("test:0", 2)
    assert size(sets.select("test:1")) == 1


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["nothing"], "no query set 'nothing'. The run and its recipe have: few, test"),
        (["nothing:0"], "no query set 'nothing'. The run and its recipe have: few, test"),
        (["few", "few"], "listed twice"),
        (["few", "test:4"], "query set 'test' must be between 0 and 3, got '4'"),
        (["few:-1"], "must be between 0 and 1"),
        (["few:"], "must be between 0 and 1"),
    ],
)
def test_what_does_not_exist_is_refused_before_weights_are_loaded(
    run: Path, names: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*args: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(backstory.Run, "load_weights", load_weights)
    with pytest.raises(UsageError, match=words):
        open_queries(run, names, "any:recipe")


def test_a_step_without_weights_is_refused_before_the_recipe_is_imported(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_recipe(*args: Any) -> None:
        raise AssertionError("the recipe was imported")

    monkeypatch.setattr("backstory.run.queries.load_recipe", load_recipe)
    with pytest.raises(StoreError, match=r"no weights at step 3 \(stored at"):
        open_queries(run, ["few"], "any:recipe", 3)


def test_a_stored_set_comes_before_one_of_the_recipe(run: Path) -> None:
    x, y = queries()
    backstory.open(run).add_queries("test", (x[:1], y[:1]))
    assert len(open_queries(run, ["test"], "any:recipe").batches["test"][0]) == 1


@pytest.mark.parametrize("batch", [X, (X, Y), {"x": X, "y": Y}])
def test_parts_are_the_whole(batch: Any) -> None:
    def first(b: Any) -> torch.Tensor:
        actual: torch.Tensor = b if isinstance(b, torch.Tensor) else b["x"] if isinstance(b, dict) else b[0]
        return actual

    assert size(batch) == 10
    actual = list(parts(batch, 4))
    assert [size(b) for b in actual] == [4, 4, 2]
    assert torch.equal(torch.cat([first(b) for b in actual]), X)
    assert size(part(batch, 0, 3)) == 3


def test_a_small_batch_stays_as_it_is() -> None:
    assert list(parts(X, 10)) == [X]
