"""The highest number of bytes that tensors take at once while something runs: what a process needs beyond torch itself.

Counted where tensors are made, so that it does not depend on what the C library keeps. Storages that were there before do not count.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the storages of what operations return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x)
        return out

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if (key := storage._cdata) not in self._known:
            size = storage.nbytes()
            self._known.add(key)
            weakref.finalize(storage, self._forget, key, size).atexit = False
            self.now += size
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_of(work: Callable[[], object]) -> int:
    """The highest number of bytes in tensors that were made by `work`."""
    live = Live()
    with live:
        work()
    return live.peak
