"""A recorded run, asked by exact unrolling."""

from pathlib import Path

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples
from tests.support.oracles import assert_same

from backstory.errors import MismatchError
from backstory.exact.query import query
from backstory.exact.reverse import reverse


def test_the_answer_is_that_of_unrolling(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", clip=0.3, dropout=0.4)
    batch = examples.make().queries["q"]
    found = query(run, examples.NAME, batch)
    expected = reverse(examples.NAME, "q", args=run.config["recipe_args"])
    assert_same(found.scores, expected.scores, 3 * examples.TERMS, size=1.0)
    assert found.method == "exact unrolling"
    assert "the replay reproduces the run" in found.caveats[0]
    assert [h.sample for h in found.top(3, query=0)] == [h.sample for h in expected.top(3, query=0)]


def test_occurrences_are_those_of_the_run(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    batch = examples.make().queries["q"]
    recipe = examples.make()
    run.load_weights(recipe.model)
    estimate = run.query(recipe.model, recipe.loss, batch)
    found = query(run, examples.NAME, batch)
    assert found.sample_ids.tolist() == estimate.sample_ids.tolist()
    assert found.steps.tolist() == estimate.steps.tolist()
    assert (found.at, found.id_kind) == (estimate.at, estimate.id_kind)
    assert float(torch.corrcoef(torch.stack([found.scores[0], estimate.scores[0]]))[0, 1]) > 0.8


def test_an_earlier_model_is_asked_at_its_step(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    found = query(run, examples.NAME, examples.make().queries["q"], at=4, check=False)
    assert found.at == 4
    assert max(found.steps) == 3
    assert "not compared" in found.caveats[0]


def test_a_recipe_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum")
    with pytest.raises(MismatchError, match="check=False"):
        query(run, examples.make, examples.make().queries["q"])
