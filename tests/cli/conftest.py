"""A small real run, recorded once for all command-line tests."""

from pathlib import Path

import pytest

import backstory
from backstory.session.recipe import take_step
from backstory.studies.digits import RECIPE, recipe


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    args = {"source": "digits", "epochs": 1}
    made = recipe("digits", epochs=1)
    path = tmp_path_factory.mktemp("runs") / "digits"
    steps = len(made.batches)
    with backstory.record(
        made.model, made.optimizer, path, loss_reduction="mean", steps=steps, checkpoints=1, warmup_steps=5,
        recipe=RECIPE, recipe_args=args,
    ) as rec:  # fmt: skip
        for t, (ids, (_, y)) in enumerate(made.batches):
            with rec.step(ids):
                take_step(made, t)
            rec.describe(ids, label=y.tolist(), text=[f"digit {int(v)}" for v in y])
    run = backstory.open(path)
    x, y = made.queries["test"]
    run.add_queries("few", (x[:3], y[:3]))
    return path
