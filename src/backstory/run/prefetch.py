"""Work that is done while the result before it is used, in a thread of its own.

Reading waits for the disk and decodes, writing encodes and waits again; between them the propagator computes. torch and the tables
let go of Python while they work, so the three can run side by side.
"""

from collections.abc import Generator
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
END: Any = object()


class _Next(Generic[T]):
    """The next item of `items`, made in a thread of its own (a pool would refuse it while Python ends)."""

    def __init__(self, items: Generator[T]) -> None:
        self._items = items
        self._found: T = END
        self._error: BaseException | None = None
        self._thread = Thread(target=self._make, name="backstory-ahead", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._found = next(self._items, END)
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Wait until it is made."""
        self._thread.join()

    def result(self) -> T:
        """The item, or END; raises what went wrong."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._found


def ahead(items: Generator[T]) -> Generator[T]:
    """The same items in the same order, each made while the one before it is used; what goes wrong is raised in its place."""
    waiting = _Next(items)
    try:
        while (item := waiting.result()) is not END:
            waiting = _Next(items)
            yield item
    finally:
        waiting.join()
        items.close()
