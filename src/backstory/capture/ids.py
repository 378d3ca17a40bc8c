"""Stable ids for the samples of a dataset."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import UsageError

ID_KEY = "sample_id"


class _WithIds(Dataset[Any]):
    """A map-style dataset whose items carry their id in front (tuples) or under `sample_id` (dicts)."""

    def __init__(self, dataset: Any, ids: Sequence[int | str]) -> None:
        self.dataset, self.ids = dataset, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        item, name = self.dataset[index], self.ids[index]
        if isinstance(item, dict):
            if ID_KEY in item:
                raise UsageError(f"the items already have a key {ID_KEY!r}. Use it as their id.")
            return {ID_KEY: name, **item}
        return (name, *item) if isinstance(item, tuple | list) else (name, item)


def with_ids(dataset: Any, ids: Sequence[int | str] | None = None) -> Dataset[Any]:
    """Add an id in front of each item of `dataset`: `(x, y)` becomes `(id, x, y)`; dicts get a `sample_id`.

    `ids` are unique ints or strings, one per item; the default is the index.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} has no length or cannot be indexed, so its items have no stable ids. Use a "
            "map-style dataset, or have an iterable one yield its own ids."
        )
    chosen: Sequence[int | str] = range(len(dataset)) if ids is None else ids
    if len(chosen) != len(dataset):
        raise UsageError(f"ids must have one entry per item, got {len(chosen)} ids for {len(dataset)} items.")
    if ids is not None and len(set(ids)) != len(ids):
        raise UsageError("ids must be unique: two items share one, so their influences could not be told apart.")
    return _WithIds(dataset, chosen)


def as_text(ids: Iterable[int | str] | Tensor) -> tuple[list[str], str]:
    """`(ids as text, "int" or "str")`; anything else, or a mixture, is refused."""
    if isinstance(ids, int | str | bytes):
        raise UsageError(f"ids must be a sequence, got the single id {ids!r}. Pass [{ids!r}].")
    values = ids.tolist() if isinstance(ids, Tensor) else [x.item() if hasattr(x, "item") else x for x in ids]
    if not isinstance(values, list):
        raise UsageError(f"ids must be a sequence with one id per sample, got the single id {values!r}.")
    kinds = {type(x) for x in values}
    if kinds <= {int} or kinds == {str}:
        return [str(x) for x in values], "str" if str in kinds else "int"
    names = ", ".join(sorted(k.__name__ for k in kinds))
    raise UsageError(f"ids must be all ints or all strings, got {names}.")


def owners(groups: Iterable[int] | Tensor, samples: int) -> list[int]:
    """Which of the step's samples each row of a batch belongs to: whole numbers below `samples`, each of them at least once."""
    values = torch.as_tensor(groups if isinstance(groups, Tensor) else list(groups)).detach().cpu().reshape(-1)
    out = [] if values.is_floating_point() else [int(x) for x in values.tolist()]
    if set(out) != set(range(samples)):
        raise UsageError(
            f"groups= must say of each row of the batch which of the {samples} ids it belongs to, as 0 … {samples - 1}, each at "
            f"least once, got {values.tolist()[:8]}. For chosen and rejected rows one after the other: list(range({samples})) * 2."
        )
    return out


def restore(texts: Sequence[str], kind: str) -> list[int | str]:
    """Ids as the user gave them."""
    return [int(x) for x in texts] if kind == "int" else list(texts)


def counts(tokens: Tensor | Sequence[int], n: int) -> Tensor:
    """Token counts of `n` samples as float64, checked."""
    values = torch.as_tensor(tokens).detach().double().cpu().reshape(-1)
    if len(values) != n or bool((values < 0).any()):
        raise UsageError(f"token counts must be ≥ 0, one per sample, got {len(values)} counts for {n} samples.")
    return values
