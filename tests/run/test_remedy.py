"""The command and the time that would make a result exact, from the run's own queries and training time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples

import backstory
from backstory.exact import costs
from backstory.replay.queries import part
from backstory.results.origin import NEEDS_RECIPE
from backstory.run.remedy import name_queries
from backstory.run.run import Run
from backstory.store import RunStore

X, Y = examples.make().queries["q"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = recorded(tmp_path_factory.mktemp("remedy") / "run")
    made.add_queries("mine", (X, Y))
    with RunStore.open(made.path, write=True) as store:
        store.update_config(training={"seconds_per_step": 30.0})
    return backstory.open(made.path)


def told(run: Run, batch: Any, **options: Any) -> str | None:
    at = options.get("at", "final")
    return run.query(run.load_weights(examples.make().model, at), examples.loss, batch, **options).to_exact


def test_a_recorded_result_names_the_command_and_the_minutes(run: Run) -> None:
    minutes = round(30 * 8 * costs.reverse(3) / 60)
    assert told(run, (X, Y)) == (
        f"To get exact values: `backstory exact {run.path} --queries mine --each` (about {minutes} minutes)."
    )
    step = run.checkpoints[1]
    minutes = round(30 * step * costs.reverse(1) / 60)
    assert told(run, (X[1:2], Y[1:2]), at=step) == (
        f"To get exact values: `backstory exact {run.path} --queries mine:1 --at {step}` (about {minutes} minutes)."
    )
    assert "--queries NAME`" in (told(run, (X[:1] + 1, Y[:1])) or "")
    mean = run.query(run.load_weights(examples.make().model), lambda m: examples.loss(m, (X, Y)).mean())
    assert mean.to_exact is None, "there is no batch that a recipe's loss could take"


def test_what_is_not_known_is_not_said(run: Run, tmp_path: Path) -> None:
    bare = recorded(tmp_path / "run")
    with RunStore.open(bare.path, write=True) as store:
        store.update_config(training={})
    assert "(about" not in (told(backstory.open(bare.path), (X, Y)) or "(about")
    with RunStore.open(bare.path, write=True) as store:
        store.update_config(recipe=None)
    assert told(backstory.open(bare.path), (X, Y)) == NEEDS_RECIPE.format(
        f"backstory exact {bare.path} --queries NAME --each"
    )


def test_queries_are_named_by_what_they_are() -> None:
    sets = {"a": (X + 1, Y), "b": {"x": X, "y": Y}, "c": X, "words": ["no tensor"]}
    assert name_queries(sets, {"y": Y, "x": X}) == "b"
    assert name_queries(sets, (X + 1, Y)) == "a"
    assert name_queries(sets, part(X, 2, 3)) == "c:2"
    assert name_queries(sets, (part(X, 2, 3) + 1, Y[2:3])) == "a:2"
    assert name_queries(sets, (part(X, 2, 3) + 1, 1 - Y[2:3])) is None
    assert name_queries(sets, X.float()) is None
    assert name_queries(sets, X[:2]) is None
    assert name_queries(sets, "text") is None
    assert name_queries({"one": torch.zeros(3)}, torch.zeros(1)) == "one:0"


def test_a_recipes_sets_are_known_where_they_are_given(run: Run) -> None:
    other = run.reopen()
    assert "--queries NAME`" in str(other.remedy((X + 2, Y)))
    other.name_queries({"test": (X + 2, Y)})
    assert "--queries test`" in str(other.remedy((X + 2, Y)))
    assert "--queries mine`" in str(other.reopen().remedy((X, Y)))
