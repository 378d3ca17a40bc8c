"""A recipe trained once under Backstory's recorder, as the studies need it."""

from pathlib import Path
from typing import Any

from backstory.recording.recorder import record
from backstory.replay.recipe import Recipe, take_step
from backstory.run.run import Run


def recorded(plan: Recipe, path: Path, **settings: Any) -> Run:
    """Train `plan` from where it is, recording into `path`; its model is trained afterwards."""
    with record(plan.model, plan.optimizer, path, loss_reduction=plan.loss_reduction, **settings) as rec:
        for t, (ids, batch) in enumerate(plan.batches):
            tokens = None if plan.tokens is None else plan.tokens(batch)
            with rec.step(ids, tokens=tokens) as s, s.outputs_of(plan.model, "cross-entropy"):
                take_step(plan, t)
    return Run(path)
