"""What was computed once and may be needed again: bounded, and computed by one thread only, however many wait for it."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from .jobs import Cancelled

V = TypeVar("V")


class Cache(Generic[V]):
    """Values by key; beyond `most` in all, the ones that were not used for longest are dropped."""

    def __init__(self, most: int, size: Callable[[V], int] = lambda value: 1) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[Hashable, Future[V]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of `key`, made now if it is not there; who comes meanwhile waits for it. An error is not cached."""
        with self._lock:
            value = self._values.get(key)
            if mine := value is None:
                value = self._values[key] = Future()
            self._values.move_to_end(key)
        assert value is not None
        if not mine:
            try:
                return value.result()
            except Cancelled:  # by who made it, and had less time
                return self.get(key, make)
        try:
            value.set_result(make())
        except BaseException as error:
            with self._lock:
                self._values.pop(key, None)
            value.set_exception(error)
            raise
        self._trim()
        return value.result()

    def peek(self, key: Hashable) -> V | None:
        """The value of `key` where it is there already; nobody waits for it, and it does not count as used."""
        with self._lock:
            value = self._values.get(key)
        return value.result() if value is not None and value.done() and value.exception() is None else None

    def __contains__(self, key: Hashable) -> bool:
        """Whether the value is there already."""
        with self._lock:
            return key in self._values and self._values[key].done()

    @property
    def total(self) -> int:
        """The size of all values together."""
        with self._lock:
            return self._sizes()

    def _sizes(self) -> int:
        return sum(self._size(f.result()) for f in self._values.values() if f.done() and f.exception() is None)

    def _trim(self) -> None:
        with self._lock:
            while len(self._values) > 1 and self._sizes() > self._most:
                oldest = next((k for k, f in self._values.items() if f.done()), None)
                if oldest is None or oldest == next(reversed(self._values)):
                    return
                del self._values[oldest]
