"""Stable ids for the examples of a data set."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UsageError

ID_KEY = "sample_id"


class _WithIds(Dataset[Any]):
    """A map-style data set whose items carry their id in front (tuples) or under `sample_id` (dicts)."""

    def __init__(self, dataset: Any, ids: Sequence[int | str]) -> None:
        self.dataset, self.ids = dataset, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        item, name = self.dataset[index], self.ids[index]
        if isinstance(item, dict):
            if ID_KEY in item:
                raise UsageError(f"the items already have a key {ID_KEY!r}: use it as their id.")
            return {ID_KEY: name, **item}
        return (name, *item) if isinstance(item, tuple | list) else (name, item)


def with_ids(dataset: Any, ids: Sequence[int | str] | None = None) -> Dataset[Any]:
    """`dataset` with an id in front of each item: `(x, y)` becomes `(id, x, y)`; dicts get `sample_id`.

    `ids` are ints or strings, one for each item, all different; the default is the index.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} has no length or no index, so its items have no stable place. "
            "Use a map-style data set, or let an iterable one yield an id of its own."
        )
    chosen: Sequence[int | str] = range(len(dataset)) if ids is None else ids
    if len(chosen) != len(dataset):
        raise UsageError(f"found {len(chosen)} ids for {len(dataset)} items; give one for each.")
    if ids is not None and len(set(ids)) != len(ids):
        raise UsageError("two items share an id; give each its own, or their influences cannot be told apart.")
    return _WithIds(dataset, chosen)


def as_text(ids: Iterable[int | str] | Tensor) -> tuple[list[str], str]:
    """`(ids as text, "int" or "str")`; anything else, or a mixture, is refused."""
    if isinstance(ids, int | str | bytes):
        raise UsageError(f"found the single id {ids!r}; expected a sequence of ids, for example [{ids!r}].")
    values = ids.tolist() if isinstance(ids, Tensor) else [x.item() if hasattr(x, "item") else x for x in ids]
    if not isinstance(values, list):
        raise UsageError(f"found the single id {values!r}; expected a sequence with one id for each sample.")
    kinds = {type(x) for x in values}
    if kinds <= {int} or kinds == {str}:
        return [str(x) for x in values], "str" if str in kinds else "int"
    names = ", ".join(sorted(k.__name__ for k in kinds))
    raise UsageError(f"found ids of type {names}; expected all ints or all strings.")


def check_unique(ids: Sequence[str], step: int) -> None:
    """The same sample twice in one step has no leave-one-out of its own."""
    if len(set(ids)) < len(ids):
        twice = next(x for i, x in enumerate(ids) if x in ids[:i])
        raise UsageError(
            f"sample {twice!r} occurs twice in step {step}. Give the copies different ids "
            "(for example `f'{id}#2'`), or sample without replacement inside a batch."
        )


def restore(texts: Sequence[str], kind: str) -> list[int | str]:
    """Ids as the user gave them."""
    return [int(x) for x in texts] if kind == "int" else list(texts)


def counts(tokens: Tensor | Sequence[int], n: int) -> Tensor:
    """Token counts of `n` samples as float64, checked."""
    values = torch.as_tensor(tokens).detach().double().cpu().reshape(-1)
    if len(values) != n or bool((values < 0).any()):
        raise UsageError(f"found {len(values)} token counts for {n} samples; expected one count ≥ 0 for each.")
    return values
