"""A checksum of what a model is given in one step, to recognise the step's data in a replay.

Each argument's bytes are summed up over the calls of the step, so that micro-batches one after another have the checksum of the
whole batch; the order and the names of the arguments do not count. A model that is never called as a whole has none.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class BatchDigest:
    """While attached, sums up the tensors that reach `model` in calls that will be differentiated."""

    def __init__(self, model: nn.Module, is_ours: Callable[[], bool] = lambda: False) -> None:
        self._model, self._is_ours = model, is_ours  # whether a call is not the training's
        self._sums: dict[int, int] | None = None  # of each argument; None outside of a step
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Install the hook."""
        see = torch.compiler.disable(self._see)
        self._handles.append(self._model.register_forward_pre_hook(see, with_kwargs=True))

    def detach(self) -> None:
        """Remove it."""
        while self._handles:
            self._handles.pop().remove()
        self._sums = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchDigest":
        return self  # a copy of the model made while recording keeps the hook, which finds it unknown

    def begin(self) -> None:
        """A new step."""
        self._sums = {}

    def end(self) -> int | None:
        """The step is over: its checksum, if there is one."""
        sums, self._sums = self._sums, None
        return zlib.crc32(repr(sorted(sums.values())).encode()) if sums else None

    def _see(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._sums is None or self._is_ours() or module is not self._model or not torch.is_grad_enabled():
            return
        for i, x in enumerate(_tensors((args, kwargs))):
            flat = x.detach().cpu().contiguous().reshape(-1)
            self._sums[i] = zlib.crc32(flat.view(torch.uint8).numpy().data if len(flat) else b"", self._sums.get(i, 0))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All strided tensors inside, in order."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
