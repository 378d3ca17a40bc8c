"""Query sets by name: those that a run stores and those of its recipe.

A query set is named as `NAME`, one query of it as `NAME:INDEX`. Names, indices and the step are checked before weights are loaded.
A batch of queries is a tensor, or a tuple, list or dict of tensors.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..errors import UsageError
from ..store.batches import MicroBatches
from ..store.run_store import HasPath, store_of
from .recipe import Recipe


class QuerySets(Mapping[str, Any]):
    """Query sets by name: those of the recipe in its order, then those that only the run stores; a stored one comes first."""

    def __init__(self, run: HasPath, recipe: Recipe | None = None) -> None:
        self._run, self._made = store_of(run), {} if recipe is None else dict(recipe.queries)
        self._stored = tuple(self._run.query_sets())

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


def sample(batch: Any, position: int) -> Any:
    """The batch of one sample of a step, whose batch may be several micro-batches."""
    if not isinstance(batch, MicroBatches):
        return part(batch, position, position + 1)
    ends = list(accumulate(map(size, batch)))
    which = bisect_right(ends, position)
    begin = ends[which] - size(batch[which])
    return MicroBatches([part(batch[which], position - begin, position - begin + 1)])


def parts(batch: Any, most: int) -> Iterator[Any]:
    """The batch in parts of at most so many queries."""
    n = size(batch)
    yield from (part(batch, lo, lo + most) for lo in range(0, n, most)) if n > most else (batch,)
