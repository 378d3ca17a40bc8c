"""Tensors inside of a module's arguments and outputs: taken out, and put back in.

Tuples, lists, dicts and dataclasses are looked into; anything else is left as it is.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Nested(NamedTuple):
    """A structure, and the tensors in it."""

    value: Any
    tensors: tuple[Tensor, ...]

    def filled(self, tensors: tuple[Tensor, ...]) -> Any:
        """The structure with other tensors, without caches of keys and values: a second call would add to them."""
        given = iter(tensors)
        return with_tensors(self.value, lambda x: next(given), keep=lambda x: not hasattr(x, "get_seq_length"))


def nested(value: Any) -> Nested:
    """`value`, and its tensors."""
    return Nested(value, tensors_in(value))


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """All tensors inside, in order."""
    return tuple(_tensors(value))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor], keep: Callable[[Any], bool] = lambda x: True) -> Any:
    """A copy of the structure, its tensors changed; what is not kept is None."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [with_tensors(x, change, keep) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [with_tensors(x, change, keep) for x in value]
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, x in value.items():
            twin[key] = with_tensors(x, change, keep)
        return twin
    if is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in fields(record):
            object.__setattr__(record, field.name, with_tensors(getattr(value, field.name), change, keep))
        return record
    return value if keep(value) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
