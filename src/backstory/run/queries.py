"""A run opened for queries by name: its recipe's model and loss, and the batches.

Names, indices and the step are checked before weights are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import StoreError, UsageError
from ..replay.queries import QuerySets
from ..replay.recipe import load_recipe, stored_args
from .gradients import LossFn
from .run import Run


@dataclass(frozen=True)
class Queries:
    """A run, its recipe's model at one step, its loss, and the batches of queries, each by the name it was selected by."""

    run: Run
    model: nn.Module  # with the weights of step `at`
    loss: LossFn
    batches: dict[str, Any]
    at: int


def open_queries(path: str | Path, queries: Sequence[str], recipe: str, at: int | str = "final") -> Queries:
    """A run with its recipe's model and loss, and the queries that each `NAME` or `NAME:INDEX` selects."""
    run = Run(path)
    step = run.step_of(at)
    if step not in run.checkpoints:
        known = ", ".join(str(c) for c in run.checkpoints if c) or "none; record with steps=…, checkpoints=K"
        raise StoreError(f"the run has no weights at step {step}. Steps with weights: {known}.")
    made = load_recipe(recipe, stored_args(run.config, recipe))
    if len(set(queries)) < len(queries):
        raise UsageError(f"query sets must be unique: one is listed twice in {', '.join(queries)}.")
    sets = QuerySets(run, made)
    batches = {selection: sets.select(selection) for selection in queries}
    return Queries(run, run.load_weights(made.model, step), made.loss, batches, step)
