"""The picture's numbers, from a small run of the demo's recipe; and its command."""

from pathlib import Path

import pytest
import torch
from experiments.__main__ import app
from experiments.picture.study import tell
from typer.testing import CliRunner

import backstory
from backstory.demo import digits
from backstory.replay.recipe import take_step


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, args = tmp_path_factory.mktemp("picture") / "run", {"source": "digits", "epochs": 2, "batch_size": 100}
    recipe = digits.recipe(**args)  # type: ignore[arg-type]
    options = {"rank": 8, "curvature": "exact:10", "steps": len(recipe.batches), "checkpoints": 1}
    with backstory.record(
        recipe.model, recipe.optimizer, path, loss_reduction="mean", recipe=digits.RECIPE, recipe_args=args, **options  # type: ignore[arg-type]
    ) as rec:  # fmt: skip
        for t, (ids, (x, y)) in enumerate(recipe.batches):
            with rec.step(ids) as step, step.outputs_of(recipe.model, "cross-entropy"):
                take_step(recipe, t)
            if t < len(recipe.batches) // 2:
                rec.describe(ids, image=[digits.png(image[0]) for image in x], label=y.tolist())
    return path


def test_the_story_of_a_prediction(run: Path) -> None:
    story = tell(run, 0, 4)
    assert story.epochs == 2
    assert len(story.up) == len(story.down) == backstory.open(run).n_steps
    assert (story.up >= 0).all()
    assert (story.down <= 0).all()
    assert len(story.towards) == len(story.away) == 4
    assert all(example.image.startswith(b"\x89PNG") for example in (*story.towards, *story.away))
    assert story.without_towards < story.probability < story.without_away


def test_up_and_down_are_the_influences_of_the_prediction(run: Path) -> None:
    recipe = digits.recipe(source="digits", epochs=2, batch_size=100)
    model = backstory.open(run).load_weights(recipe.model)
    x, _ = recipe.queries["test"]
    own = torch.tensor([-1])  # the model's own prediction
    expected = backstory.open(run).query(model, recipe.loss, (x[:1], own)).by_step().influence
    story = tell(run, 0, 1)
    torch.testing.assert_close(
        torch.from_numpy(story.up + story.down), torch.from_numpy(expected), rtol=1e-6, atol=1e-12
    )


def test_the_command_writes_the_picture(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    words = ["picture", str(run), "--index", "0", "--top", "2", "--write", str(file)]
    actual = CliRunner().invoke(app, words, catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    assert "trained again without the 2 most helpful images" in actual.output.replace("\n", " ")
    assert file.read_text().count("<image") == 5
