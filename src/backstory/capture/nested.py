"""Tensors inside of a module's arguments and outputs: taken out, and put back in."""

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree


class Nested(NamedTuple):
    """A structure of lists, tuples, dicts and the like, its tensors apart."""

    leaves: tuple[Any, ...]  # tensors, records (dataclasses) with tensors inside, and anything else
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, in order."""
        return tuple(x for leaf in self.leaves for x in _tensors_of(leaf))

    def filled(self, tensors: tuple[Tensor, ...]) -> Any:
        """The structure with other tensors."""
        return self._filled(iter(tensors))

    def _filled(self, given: Iterator[Tensor]) -> Any:
        return pytree.tree_unflatten([_with(leaf, given) for leaf in self.leaves], self.spec)


class _Record(NamedTuple):
    """A dataclass, and what is in its fields."""

    value: Any
    inside: Nested


def nested(value: Any) -> Nested:
    """`value`, its tensors apart."""
    leaves, spec = pytree.tree_flatten(value)
    return Nested(tuple(map(_leaf, leaves)), spec)


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """All tensors inside, in order."""
    return (value,) if isinstance(value, Tensor) else nested(value).tensors


def _leaf(x: Any) -> Any:
    if is_dataclass(x) and not isinstance(x, type):
        return _Record(x, nested([getattr(x, field.name, None) for field in fields(x)]))
    return x


def _tensors_of(leaf: Any) -> tuple[Tensor, ...]:
    if isinstance(leaf, _Record):
        return leaf.inside.tensors
    return (leaf,) if isinstance(leaf, Tensor) else ()


def _with(leaf: Any, given: Iterator[Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return next(given)
    if isinstance(leaf, _Record):
        twin = copy.copy(leaf.value)
        for field, x in zip(fields(twin), leaf.inside._filled(given), strict=True):
            object.__setattr__(twin, field.name, x)
        return twin
    # a cache of keys and values would be added to by a second call; training starts from an empty one
    return None if hasattr(leaf, "get_seq_length") else leaf
