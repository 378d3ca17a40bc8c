"""A recipe in another floating-point precision: the model, the optimizer's state and the batches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .recipe import Recipe


def in_precision(recipe: Recipe, dtype: torch.dtype | None) -> Recipe:
    """`recipe` with every floating-point number in `dtype`; None leaves it as it is."""
    if dtype is None:
        return recipe
    recipe.model.to(dtype)  # keeps the parameters' identity, so the optimizer still holds them
    if recipe.optimizer.state:
        recipe.optimizer.load_state_dict(recipe.optimizer.state_dict())  # casts to the parameters' type
    return replace(
        recipe,
        batches=_Converted(recipe.batches, dtype),
        queries={name: convert(batch, dtype) for name, batch in recipe.queries.items()},
    )


def convert(batch: Any, dtype: torch.dtype | None) -> Any:
    """The floating-point tensors of a batch (a tensor, or tuples, lists and mappings of them) in `dtype`."""
    if dtype is None:
        return batch
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: convert(value, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(convert(value, dtype) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(convert(value, dtype) for value in batch)
    return batch


class _Converted(Sequence[Any]):
    """The batches of a recipe, converted when they are asked for."""

    def __init__(self, batches: Sequence[tuple[Sequence[int | str], Any]], dtype: torch.dtype) -> None:
        self.batches, self.dtype = batches, dtype

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: Any) -> Any:
        ids, batch = self.batches[step]
        return ids, convert(batch, self.dtype)
