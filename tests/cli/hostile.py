"""A folder in which somebody types commands, with files in it that have the names of packages; and runs to type them about."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import backstory

HOSTILE = (
    "click", "fastapi", "jinja2", "kronfluence", "lance", "multiprocessing", "numpy", "plotly", "pydantic", "rich", "sklearn",
    "starlette", "threading", "torch", "transformers", "typer", "uvicorn",
)  # fmt: skip
SPRUNG = """from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
raise RuntimeError("a file of the current folder was run")
"""
TRAINING = """
import torch
from neighbour import WIDTH

import backstory


def losses(model, batch):
    import late

    return late.squared(model(batch))


def recipe(seed=0):
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(seed))
    model = torch.nn.Linear(WIDTH, 2)
    return backstory.Recipe(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=losses,
        batches=[(list(range(4 * t, 4 * t + 4)), x[4 * t : 4 * t + 4]) for t in range(6)], queries={"test": x[:3]},
    )
"""


class Hostile(NamedTuple):
    """A folder in which somebody types commands; files with the names of packages lie in it, and a recipe of the user."""

    folder: Path
    mine: Path  # a run that names the recipe
    bare: Path  # the same, without

    def ran(self) -> list[str]:
        """Which of the files were run."""
        return sorted(file.stem for file in self.folder.glob("*.ran"))


def made(folder: Path, runs: Path) -> Hostile:
    """The folder, and its runs elsewhere."""
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(SPRUNG)
    (folder / "my_training.py").write_text(TRAINING)
    (folder / "neighbour.py").write_text("WIDTH = 5\n")
    (folder / "late.py").write_text("def squared(outputs):\n    return outputs.square().sum(1)\n")
    x, model = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)), torch.nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"projection": "random", "rank": 2, "steps": 6, "checkpoints": 1}
    with backstory.record(
        model, optimizer, runs / "mine", loss_reduction="mean", recipe="my_training:recipe", recipe_args={"seed": 0}, **settings
    ) as rec:  # fmt: skip
        for t in range(6):
            ids = list(range(4 * t, 4 * t + 4))
            with rec.step(ids):
                model(x[ids]).square().sum(1).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            rec.describe(ids, text=[f"sample {i}" for i in ids], source=["a", "b"] * 2)
    return Hostile(folder, runs / "mine", renamed(runs / "mine", runs / "bare", None))


def renamed(run: Path, copy: Path, recipe: str | None, args: Mapping[str, Any] | None = None) -> Path:
    """A copy of a run that names another recipe."""
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "recipe": recipe, "recipe_args": dict(args or {})}))
    return copy
