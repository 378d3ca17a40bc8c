"""A run opened for queries by name: its recipe's model and loss, and the batches.

Names, indices and the step are checked before weights are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..replay.queries import QuerySets, parts, size
from ..replay.recipe import Presentation, load_recipe, stored_args
from ..results.effects import GroupEffects
from .changes import WeightChanges
from .gradients import LossFn, evaluate
from .run import Run

AT_ONCE = 256  # queries that are evaluated together


@dataclass(frozen=True)
class Queries:
    """A run, its recipe's model at one step, its loss, and the batches of queries, each by the name it was selected by."""

    run: Run
    model: nn.Module  # with the weights of step `at`
    loss: LossFn
    batches: dict[str, Any]
    at: int
    page: Presentation = field(default_factory=Presentation)

    def describe(self, selection: str) -> str:
        """The model's loss on a selection; of a single query also its label and the prediction, where the recipe's page has them."""
        batch = self.batches[selection]
        losses = [float(x) for few in parts(batch, AT_ONCE) for x in evaluate(self.model, self.loss, few).reshape(-1)]
        if size(batch) > 1:
            return f"Query set {selection}: {size(batch):,} queries, mean loss {sum(losses) / len(losses):.3g}."
        label = self.page.show(batch)[0].get("label") if self.page.show is not None else None
        predicted = None if self.page.predict is None else evaluate(self.model, self.page.predict, batch)[0]
        known = {"label": label, "predicted": predicted, "loss": f"{sum(losses):.3g}"}
        return f"Query {selection}: {', '.join(f'{name} {x}' for name, x in known.items() if x is not None)}."

    def effects(self, changes: WeightChanges, at: int | str = "final") -> GroupEffects:
        """What groups do to the mean loss of each selection."""

        def means(model: nn.Module, batches: list[Any]) -> Tensor:
            return torch.stack([self.loss(model, batch).mean() for batch in batches])

        return changes.effects(self.model, means, list(self.batches.values()), at, queries=list(self.batches))


def open_queries(path: str | Path, queries: Sequence[str], recipe: str, at: int | str = "final") -> Queries:
    """A run with its recipe's model and loss, and the queries that each `NAME` or `NAME:INDEX` selects."""
    run = Run(path)
    step = run.step_of(at)
    if step not in run.checkpoints:
        run.load_weights(nn.Module(), step)  # which says why there are none
    made = load_recipe(recipe, stored_args(run, recipe))
    if len(set(queries)) < len(queries):
        raise UsageError(f"query sets must be unique: one is listed twice in {', '.join(queries)}.")
    sets = QuerySets(run, made)
    run.name_queries(made.queries)
    batches = {selection: sets.select(selection) for selection in queries}
    return Queries(run, run.load_weights(made.model, step), made.loss, batches, step, made.page)
