"""Batches of queries: how many they hold, and parts of them. A tensor, or a tuple or dict of tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def size(batch: Any) -> int:
    """How many queries a batch holds."""
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
