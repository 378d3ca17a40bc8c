"""Query sets by name: those that a run stores and those of its recipe, with the model and the loss that evaluate them.

A query set is named as `NAME`, one query of it as `NAME:INDEX`. Names, indices and the step are checked before weights are loaded.
A batch of queries is a tensor, or a tuple, list or dict of tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import StoreError, UsageError
from ..run.gradients import LossFn, evaluate
from ..run.run import Run
from .recipe import Presentation, Recipe, load_recipe, stored_args

AT_ONCE = 256  # queries that are evaluated together


@dataclass(frozen=True)
class Queries:
    """A run, its recipe's model at one step, its loss, and the batches of queries, each by the name it was selected by."""

    run: Run
    model: nn.Module  # with the weights of step `at`
    loss: LossFn
    batches: dict[str, Any]
    at: int
    page: Presentation

    def describe(self, selection: str) -> str:
        """The model's loss on a selection; of a single query also its label and the prediction, where the recipe's page has them."""
        batch = self.batches[selection]
        losses = [float(x) for few in parts(batch, AT_ONCE) for x in evaluate(self.model, self.loss, few).reshape(-1)]
        if size(batch) > 1:
            return f"Query set {selection}: {size(batch):,} queries, mean loss {sum(losses) / len(losses):.3g}."
        show, predict = self.page.show, self.page.predict
        label = None if show is None else show(batch)[0].get("label")
        words = [] if label is None else [f"label {label}"]
        words += [] if predict is None else [f"predicted {evaluate(self.model, predict, batch)[0]}"]
        return f"Query {selection}: {', '.join([*words, f'loss {sum(losses):.3g}'])}."


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
    return Queries(run, run.load_weights(made.model, step), made.loss, batches, step, made.page)


class QuerySets(Mapping[str, Any]):
    """Query sets by name: those of the recipe in its order, then those that only the run stores; a stored one comes first."""

    def __init__(self, run: Run, recipe: Recipe | None = None) -> None:
        self._run, self._made = run, {} if recipe is None else dict(recipe.queries)
        self._stored = tuple(run.query_sets)

    def __getitem__(self, name: str) -> Any:
        return self._run.queries(name) if name in self._stored else self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._made, **dict.fromkeys(self._stored)})

    def __len__(self) -> int:
        return len({*self._made, *self._stored})

    def select(self, selection: str) -> Any:
        """The batch that `NAME` means, or the batch of one that `NAME:INDEX` means."""
        name, index = self.parse(selection)
        batch = self[name]
        return batch if index is None else part(batch, index, index + 1)

    def parse(self, selection: str) -> tuple[str, int | None]:
        """`NAME[:INDEX]` as a set that exists and an index within it."""
        name, colon, number = (selection, "", "") if selection in self else selection.rpartition(":")
        name = name or selection
        if name not in self:
            known = ", ".join(sorted(self)) or "none"
            raise UsageError(f"there is no query set {name!r}. The run and its recipe have: {known}.")
        if not colon:
            return name, None
        count = size(self[name])
        if not number.isdecimal() or int(number) >= count:
            raise UsageError(f"the index in query set {name!r} must be between 0 and {count - 1}, got {number!r}.")
        return name, int(number)


def size(batch: Any) -> int:
    """How many queries a batch has."""
    first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch
    return len(first[0]) if isinstance(first, tuple | list) else len(first)


def part(batch: Any, first: int, last: int) -> Any:
    """Queries first … last−1; what is no batch of tensors as it is."""
    if isinstance(batch, Tensor):
        return batch[first:last]
    if isinstance(batch, Mapping):
        return {k: part(v, first, last) for k, v in batch.items()}
    return tuple(part(x, first, last) for x in batch) if isinstance(batch, tuple | list) else batch


def parts(batch: Any, most: int) -> Iterator[Any]:
    """The batch in parts of at most so many queries."""
    n = size(batch)
    yield from (part(batch, lo, lo + most) for lo in range(0, n, most)) if n > most else (batch,)
