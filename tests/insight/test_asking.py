"""Questions from outside: by run, recipe and query set."""

from pathlib import Path

import pytest
import torch
from tests.insight.runs import Small, loss, queries, small
from tests.support.loops import mlp, sgd

import backstory
from backstory.errors import UsageError
from backstory.insight.asking import asked, mean_influence


def recipe() -> backstory.Recipe:
    model = mlp()
    return backstory.Recipe(model=model, optimizer=sgd(model), loss=loss, batches=[], queries={"test": queries()})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = small("sgd", tmp_path / "run")
    x, y = made.queries
    made.run.add_queries("few", (x[:2], y[:2]))
    monkeypatch.setattr("backstory.insight.asking.load_recipe", lambda name, args: recipe())
    return tmp_path / "run"


def test_sets_of_the_run_and_of_the_recipe(run: Path) -> None:
    found = asked(run, ["few", "test"], "any:recipe", 8)
    assert found.at == 8
    assert list(found.batches) == ["few", "test"]
    assert (len(found.batches["few"][0]), len(found.batches["test"][0])) == (2, 4)
    expected = found.run.load_weights(mlp(), 8).state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in found.model.state_dict().items())
    assert found.loss is loss


def test_unknown_and_repeated_sets(run: Path) -> None:
    with pytest.raises(UsageError, match="'nothing'; the run and its recipe have: few, test"):
        asked(run, ["nothing"], "any:recipe")
    with pytest.raises(UsageError, match="named twice"):
        asked(run, ["few", "few"], "any:recipe")


def test_a_stored_set_comes_before_one_of_the_recipe(run: Path) -> None:
    x, y = queries()
    backstory.open(run).add_queries("test", (x[:1], y[:1]))
    assert len(asked(run, ["test"], "any:recipe").batches["test"][0]) == 1


def test_the_mean_influence_is_the_mean_of_the_answers(plain: Small) -> None:
    found = mean_influence(plain.run, plain.model, loss, plain.queries)
    expected = plain.run.query(plain.model, loss, plain.queries).scores.mean(0)
    torch.testing.assert_close(found.scores[0], expected, rtol=1e-9, atol=1e-14)
    assert found.n_queries == 1
