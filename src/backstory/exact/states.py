"""States of training on disk while a sweep goes over them, so that memory holds one or two.

They lie in a file without a name, which is gone with the process, however it ends.

Shapes:  n numbers in all parameters.
"""

import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..replay.update import Slots
from ..store.files import writing
from .derivative import State, flat

SHARE = 4  # a sweep takes at most this part of the free disk


class Place(NamedTuple):
    """Where a tensor lies."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    same: bool  # one number, as often as the shape says


class States(MutableMapping[int, Any]):
    """States by step: a tensor, or dicts, lists and tuples of them. What is not a tensor stays in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        with writing(self._folder):
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        self._end, self._states = 0, dict[int, Any]()

    def __setitem__(self, step: int, state: Any) -> None:
        self._states[step] = _each(state, Tensor, self._write)

    def __getitem__(self, step: int) -> Any:
        return _each(self._states[step], Place, self._read)

    def __delitem__(self, step: int) -> None:
        del self._states[step]
        if not self._states:
            self._end = 0  # its room is used again

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def close(self) -> None:
        """Give the room back."""
        self._file.close()

    def _write(self, x: Tensor) -> Place:
        same = x.numel() > 1 and not any(x.stride())
        place = Place(self._end, x.shape, x.dtype, x.device, same)
        data = _bytes((x.reshape(-1)[0].clone().reshape(1) if same else x).detach().cpu().contiguous())
        self._file.seek(self._end)
        with writing(self._folder):
            self._file.write(data)
        self._end += len(data)
        return place

    def _read(self, place: Place) -> Tensor:
        x = torch.empty((1,) if place.same else place.shape, dtype=place.dtype)
        self._file.seek(place.begin)
        self._file.readinto(_bytes(x))
        return (x.reshape(()).expand(place.shape) if place.same else x).to(place.device)


def _bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor; one value is contiguous whatever its strides are."""
    if not x.numel():
        return memoryview(bytearray())
    data: memoryview = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data
    return data


def _each(value: Any, kind: type, change: Any) -> Any:
    """`value`, with every `kind` in its dicts, lists and tuples changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {k: _each(x, kind, change) for k, x in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, Place):
        return type(value)(*(_each(x, kind, change) for x in value))
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size | Place):
        return type(value)(_each(x, kind, change) for x in value)
    return value


def flat_state(slots: Slots) -> State:
    """θ, m and v in flat coordinates; a part that the optimizer does not keep is one 0 for all."""
    theta, shapes = flat(slots.theta), [x.shape for x in slots.theta]
    none = theta.new_zeros(()).expand_as(theta)
    parts = []
    for part in (slots.m, slots.v):
        kept = any(x.shape == shape and x.dim() for x, shape in zip(part, shapes, strict=True))
        full = [x.expand(shape) for x, shape in zip(part, shapes, strict=True)]
        parts.append(flat(full) if kept else none)
    return State(theta, *parts)


def affordable(state: State, folder: Path | None = None) -> int:
    """How many such states may lie on the disk."""
    size = sum(x.numel() * x.element_size() for x in state if any(x.stride()))
    free = shutil.disk_usage(Path(tempfile.gettempdir() if folder is None else folder)).free
    return max(2, free // SHARE // max(1, size))
