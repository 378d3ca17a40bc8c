"""The fine-tuning demo: stories15M on one domain, each sequence once and a few three times, and the timeline of either.

The paper's fine-tuning figure: there, a pretrained model that sees new text once has no ascent at the end, and one that sees a small set three
times has. Only a timeline is wanted, so that the recording is a cheap one: rank 8, no checkpoints, no embeddings.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..insight import Phases, Timeline, phases, timeline
from ..recording.recorder import record
from ..replay.recipe import Recipe, take_step
from ..run.run import Run
from . import stories_run
from .gpt_model import counts
from .images import fresh
from .stories_run import RECIPE, StoriesSetup, mean_loss

Say = Callable[[str, int, int], None]  # (stage, done, in all)
PASSES = (1, 3)
RANK = 8


@dataclass(frozen=True)
class FineTuning:
    """One fine-tuning and its timeline."""

    setup: StoriesSetup
    run: str
    before: float  # nats a token on unseen sequences
    after: float
    timeline: Timeline
    signed: Phases  # of the timeline's means with their sign, as the paper draws them
    undivided: Phases  # of the sizes as they are, not divided by the rate
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {k: getattr(self, k) for k in ("run", "before", "after", "seconds")}
        setup = {**asdict(self.setup), "sequences": self.setup.sequences}
        return {
            "setup": setup, **plain, "timeline": self.timeline.as_dict(), "phases_of_signed_means": self.signed.as_dict(),
            "phases_of_undivided_sizes": self.undivided.as_dict(),
        }  # fmt: skip


def stories(
    out: Path, setup: StoriesSetup | None = None, *, passes: Sequence[int] = PASSES, say: Say | None = None
) -> list[FineTuning]:
    """One fine-tuning for each number of passes, recorded in `out/run-1`, `out/run-3` and so on."""
    chosen, report = setup or StoriesSetup(), say or (lambda stage, done, total: None)
    return [_fine_tuned(out, replace(chosen, passes=n), report) for n in passes]


def _fine_tuned(out: Path, setup: StoriesSetup, say: Say) -> FineTuning:
    path, began = fresh(out / f"run-{setup.passes}", RECIPE), time.perf_counter()
    recipe = stories_run.recipe(**asdict(setup))
    batch = recipe.queries["unseen"]
    before = _loss(recipe)
    _train(setup, recipe, path, say)
    when = timeline(Run(path), recipe.model, mean_loss, batch, seed=setup.seed)
    signed, plain = (phases(curve, seed=setup.seed) for curve in (when.per_rate, when.size * when.rate))
    return FineTuning(setup, str(path), before, _loss(recipe), when, signed, plain, time.perf_counter() - began)


def _train(setup: StoriesSetup, recipe: Recipe, path: Path, say: Say) -> None:
    with record(
        recipe.model, recipe.optimizer, path, loss_reduction="token-mean", rank=RANK, steps=setup.steps, recipe=RECIPE,
        recipe_args=asdict(setup),
    ) as rec:  # fmt: skip
        for t, (ids, tokens) in enumerate(recipe.batches):
            with rec.step(ids, tokens=counts(tokens)) as s:
                s.losses(take_step(recipe, t))
            say(f"fine-tune, {setup.passes} × each sequence", t + 1, setup.steps)


def _loss(recipe: Recipe) -> float:
    recipe.model.eval()
    with torch.no_grad():
        return float(mean_loss(recipe.model, recipe.queries["unseen"]))


def heading(one: FineTuning) -> str:
    """What this fine-tuning is, in one line."""
    often = "once" if one.setup.passes == 1 else f"{one.setup.passes} times"
    return f"{one.setup.sequences:,} sequences of {one.setup.domain!r}, each used {often}."
