"""What was computed once and may be asked for again: bounded, and computed by one thread only, however many ask."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from .cancellation import GivenUp

V = TypeVar("V")


class Kept(Generic[V]):
    """Values by key; beyond `most` in all, the ones that were not asked for longest are dropped."""

    def __init__(self, most: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self._most, self._size = most, size
        self._held: OrderedDict[Hashable, Future[V]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, made now if it is not there; who comes meanwhile waits for it. An error is not kept."""
        with self._lock:
            found = self._held.get(key)
            if mine := found is None:
                found = self._held[key] = Future()
            self._held.move_to_end(key)
        assert found is not None
        if not mine:
            try:
                return found.result()
            except GivenUp:  # by who made it, and had less time
                return self.get(key, make)
        try:
            found.set_result(make())
        except BaseException as error:
            with self._lock:
                self._held.pop(key, None)
            found.set_exception(error)
            raise
        self._trim()
        return found.result()

    def peek(self, key: Hashable) -> V | None:
        """The value of `key` where it is there already; nobody waits for it, and it does not count as asked for."""
        with self._lock:
            found = self._held.get(key)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def __contains__(self, key: Hashable) -> bool:
        """Whether the value is there already."""
        with self._lock:
            return key in self._held and self._held[key].done()

    @property
    def total(self) -> int:
        """The size of all values together."""
        with self._lock:
            return self._sizes()

    def _sizes(self) -> int:
        return sum(self._size(f.result()) for f in self._held.values() if f.done() and f.exception() is None)

    def _trim(self) -> None:
        with self._lock:
            while len(self._held) > 1 and self._sizes() > self._most:
                oldest = next((k for k, f in self._held.items() if f.done()), None)
                if oldest is None or oldest == next(reversed(self._held)):
                    return
                del self._held[oldest]
