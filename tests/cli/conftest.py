"""A small real run, recorded once for all command-line tests, and a folder that no command may trust."""

from pathlib import Path

import pytest
from tests.cli.hostile import Hostile, made

import backstory
from backstory.demo.digits import RECIPE, recipe
from backstory.replay.recipe import take_step


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    args = {"source": "digits", "epochs": 1}
    plan = recipe("digits", epochs=1)
    path = tmp_path_factory.mktemp("runs") / "digits"
    steps = len(plan.batches)
    with backstory.record(
        plan.model, plan.optimizer, path, loss_reduction="mean", steps=steps, checkpoints=1, warmup_steps=5,
        recipe=RECIPE, recipe_args=args,
    ) as rec:  # fmt: skip
        for t, (ids, (_, y)) in enumerate(plan.batches):
            with rec.step(ids):
                take_step(plan, t)
            rec.describe(ids, label=y.tolist(), text=[f"digit {int(v)}" for v in y])
    run = backstory.open(path)
    x, y = plan.queries["test"]
    run.add_queries("few", (x[:3], y[:3]))
    return path


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return made(tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("runs"))
