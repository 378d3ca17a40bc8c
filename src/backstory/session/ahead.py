"""Work that is done while the result before it is used, in a thread of its own.

Reading waits for the disk and decodes, writing encodes and waits again; between them the propagator computes. torch and the tables
let go of Python while they work, so the three can run side by side.
Knows nothing of what the work is.
"""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def ahead(items: Generator[T]) -> Generator[T]:
    """The same items in the same order, each made while the one before it is used; what goes wrong is raised in its place."""
    end: Any = object()
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="backstory-ahead") as pool:
            waiting = pool.submit(next, items, end)
            while (item := waiting.result()) is not end:
                waiting = pool.submit(next, items, end)
                yield item
    finally:
        items.close()
