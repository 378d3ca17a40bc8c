"""What the demos share: a folder for the run, the recording of a recipe, and how long each stage took."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..recording.recorder import record
from ..replay.recipe import Recipe, take_step
from ..run.run import Run

Progress = Callable[[str, int, int], None]  # (stage, done, in all)
StageProgress = Callable[[int, int], None]


class Stages:
    """Reports the progress of each stage, and keeps its time."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress or (lambda stage, done, total: None)

    @contextmanager
    def stage(self, name: str) -> Iterator[StageProgress]:
        """A stage; what it gives takes (done, in all)."""
        began = time.perf_counter()
        yield lambda done, total: self._progress(name, done, total)
        self.seconds[name] = time.perf_counter() - began


def prepare_folder(path: Path, recipe: str) -> Path:
    """An empty place for the run; an earlier run of the same demo is replaced, anything else is left alone."""
    if path.exists():
        if not (path / "config.json").exists() or Run(path).config.get("recipe") != recipe:
            raise StoreError(f"{path} exists and is not a run of the demo. Choose another folder with --out.")
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def record_recipe(
    plan: Recipe, path: Path, progress: StageProgress, *, outputs: str | None = None, **settings: Any
) -> Run:
    """Train by the plan and record; `outputs` is the kind of the model's outputs, where curvature needs them."""
    steps, settings = len(plan.batches), {**settings, "clip_norm": plan.clip_norm}
    with record(plan.model, plan.optimizer, path, loss_reduction=plan.loss_reduction, steps=steps, **settings) as rec:
        for t, (ids, batch) in enumerate(plan.batches):
            tokens = None if plan.tokens is None else plan.tokens(batch)
            with rec.step(ids, tokens=tokens) as s, s.outputs_of(plan.model, outputs) if outputs else nullcontext():
                s.losses(take_step(plan, t))
            progress(t + 1, steps)
    return Run(path)
