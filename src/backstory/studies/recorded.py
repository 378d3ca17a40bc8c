"""A recipe trained once under Backstory's recorder, as the small studies need it.

Knows nothing of retraining or of scores.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..session.recipe import Recipe, take_step
from ..session.recording import record
from ..session.run import Run
from ..session.step import StepScope


def recorded(plan: Recipe, path: Path, *, curvature: str, **settings: Any) -> Run:
    """Train `plan` from where it is, recording into `path`; its model is trained afterwards."""
    with record(
        plan.model, plan.optimizer, path, loss_reduction=plan.loss_reduction, curvature=curvature, **settings
    ) as rec:
        for t, (ids, _) in enumerate(plan.batches):
            with rec.step(ids) as s, _outputs(plan.model, s, curvature):
                take_step(plan, t)
    return Run(path)


@contextmanager
def _outputs(model: nn.Module, s: StepScope, curvature: str) -> Iterator[None]:
    """Hand the outputs of the forward pass to the recorder, where the curvature needs them."""
    if curvature == "empirical":
        yield
        return
    handle = model.register_forward_hook(lambda module, args, out: s.outputs(out, "cross-entropy"))
    try:
        yield
    finally:
        handle.remove()
