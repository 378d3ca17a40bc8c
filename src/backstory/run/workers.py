"""Background work: prepare the next item in a thread while the current one is used, and spread jobs over processes.

Reading waits for the disk and decodes, writing encodes and waits again; between them the propagator computes. torch and the tables
let go of Python while they work, so the three can run side by side.
"""

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
END: Any = object()


class _Next(Generic[T]):
    """The next item of `items`, made in a thread of its own (a pool would refuse it while Python ends)."""

    def __init__(self, items: Generator[T]) -> None:
        self._items = items
        self._item: T = END
        self._error: BaseException | None = None
        self._thread = Thread(target=self._make, name="backstory-ahead", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._item = next(self._items, END)
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
        return self._item


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


ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def spread(work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, Any]]:
    """`(number of the job, work(*job))` as they are done; `work` and its arguments must be importable by name."""
    context = multiprocessing.get_context("spawn")
    with _one_thread(), ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        waiting = {pool.submit(work, *job): i for i, job in enumerate(jobs)}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:
            for job in waiting:
                job.cancel()
            raise


@contextmanager
def _one_thread() -> Iterator[None]:
    """Children inherit the environment in which they are started."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
