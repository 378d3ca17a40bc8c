"""Carry ids along with the batches of a DataLoader: through samplers, collators, removed columns, workers and skipped batches.

A data set is wrapped so that each item comes with its id; the collator is wrapped so that it sees the items as they were, and
the ids join the batch behind it. Nothing but `dataset` and `collate_fn` of the loader changes, and no random number is drawn.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..capture.ids import ID_KEY, as_text
from ..errors import UsageError

# one for each item; a column's name; None: `sample_id` if there is one, else the index
Ids = Sequence[int | str] | str | None


class Named(NamedTuple):
    """An item of the data set and its id."""

    name: int | str
    item: Any


class Paired(NamedTuple):
    """A batch and the ids of its samples."""

    names: list[int | str]
    batch: Any


class _Wrapper:
    """Gives what the data set inside has beside its items, such as `set_epoch`."""

    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class NamedItems(_Wrapper, Dataset[Named]):
    """A map-style data set whose items come with their ids."""

    def __init__(self, dataset: Any, ids: Ids) -> None:
        self.dataset, self.ids = dataset, ids
        if not isinstance(ids, str | None) and len(ids) != len(dataset):
            raise UsageError(f"ids must have one entry per item, got {len(ids)} ids for {len(dataset)} items.")

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Named:
        return self._named(index, self.dataset[index])

    def __getitems__(self, indices: Sequence[Any]) -> list[Named]:
        many = getattr(self.dataset, "__getitems__", None)  # what torch's loader asks for first
        items = many(indices) if many is not None else [self.dataset[i] for i in indices]
        return [self._named(i, item) for i, item in zip(indices, items, strict=True)]

    def _named(self, index: Any, item: Any) -> Named:
        if isinstance(self.ids, str):
            return Named(_column(item, self.ids), item)
        if self.ids is not None:
            return Named(self.ids[index], item)
        named = isinstance(item, Mapping) and ID_KEY in item
        return Named(_column(item, ID_KEY) if named else _number(index), item)


class NamedStream(_Wrapper, IterableDataset[Named]):
    """An iterable data set whose items carry their id in a column."""

    def __init__(self, dataset: Any, ids: Ids) -> None:
        self.dataset, self.column = dataset, ID_KEY if ids is None else ids
        if not isinstance(self.column, str):
            raise UsageError(
                f"ids cannot be a list for {type(dataset).__name__}, an iterable dataset whose items have no index. "
                "Store each item's id under a key, and pass ids='that key'."
            )

    def __iter__(self) -> Iterator[Named]:
        assert isinstance(self.column, str)
        for item in self.dataset:
            yield Named(_column(item, self.column), item)


def _beside(collate: Callable[[list[Any]], Any], items: Sequence[Named]) -> Paired:
    """A batch as `collate` makes it, whatever that is, and the ids beside it."""
    return Paired([x.name for x in items], collate([x.item for x in items]))


def _inside(collate: Callable[[list[Any]], Any], items: Sequence[Named]) -> Any:
    """A batch as `collate` makes it, a dict, that also holds the ids, as a tensor under `sample_id`."""
    names, batch = _beside(collate, items)
    batch[ID_KEY] = encoded(names)
    return batch


def _stripped(pairs: Iterator[Paired], queue: "deque[list[int | str]]") -> Iterator[Any]:
    """The batches, whose ids go into a queue."""
    for names, batch in pairs:
        if batch is not None:  # which trainers leave out
            queue.append(names)
        yield batch


def carry(loader: DataLoader[Any], ids: Ids) -> Callable[[], None]:
    """Let `loader` put ids into its batches from its next pass on; returns what undoes it."""
    dataset, collate = loader.dataset, loader.collate_fn
    _put(loader, _named(loader, ids), partial(_inside, collate))
    return lambda: _put(loader, dataset, collate)


def queued(loader: DataLoader[Any], ids: Ids, queue: "deque[list[int | str]]") -> DataLoader[Any]:
    """A loader that yields the batches of `loader` as they are, and puts the ids of each into `queue`."""
    kind = type(loader)

    def begin(self: Any) -> Iterator[Any]:
        queue.clear()
        return _stripped(kind.__iter__(self), queue)

    twin = copy.copy(loader)  # sampler and generator are shared: the order is the same
    _put(twin, _named(loader, ids), partial(_beside, loader.collate_fn))
    twin.__class__ = type(kind.__name__, (kind,), {"__iter__": begin})
    return twin


def encoded(names: Sequence[int | str]) -> Tensor:
    """Ids as a tensor, since trainers move, slice and join nothing else: int64 (B,), or the bytes of texts (B, L)."""
    texts, kind = as_text(names)
    if kind == "int":
        return torch.tensor([int(x) for x in texts], dtype=torch.int64)
    return pad_sequence([torch.tensor(list(x.encode()), dtype=torch.uint8) for x in texts], batch_first=True)


def decoded(names: Tensor) -> list[int | str]:
    """The ids that `encoded` made a tensor of."""
    if names.dtype != torch.uint8:
        return list(names.tolist())
    return [bytes(row).rstrip(b"\0").decode() for row in names.tolist()]


def _named(loader: DataLoader[Any], ids: Ids) -> Dataset[Named]:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UsageError(
            "the DataLoader has batch_size=None, so its items are whole batches and their samples have no ids. Let "
            "the DataLoader form the batches, or write the loop yourself with backstory.record."
        )
    dataset = loader.dataset
    if isinstance(dataset, NamedItems | NamedStream):
        dataset = dataset.dataset
    return NamedStream(dataset, ids) if isinstance(dataset, IterableDataset) else NamedItems(dataset, ids)


def _put(loader: DataLoader[Any], dataset: Any, collate: Callable[[Any], Any]) -> None:
    object.__setattr__(loader, "dataset", dataset)  # torch forbids it, for fear of another length
    loader.collate_fn = collate


def _column(item: Any, column: str) -> int | str:
    if not isinstance(item, Mapping) or column not in item:
        keys = sorted(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
        raise UsageError(
            f"an item of the training data has no id under the key {column!r}, only {keys}. An iterable dataset must "
            "yield an id with each item. If the trainer drops columns (as Hugging Face's does), pass "
            f"ids=dataset[{column!r}] or set remove_unused_columns=False."
        )
    value = item[column]
    name: int | str = value.item() if hasattr(value, "item") else value
    return name


def _number(index: Any) -> int:
    try:
        return int(index)
    except (TypeError, ValueError):
        raise UsageError(
            f"the sampler requests item {index!r} of the training data, which is not a number and so cannot serve as "
            "an id. Store each item's id under a key, and pass ids='that key'."
        ) from None
