"""Background work: prepare the next item in a thread while the current one is used, and spread jobs over processes.

Reading waits for the disk and decodes, writing encodes and waits again; between them the propagator computes. torch and the tables
let go of Python while they work, so the three can run side by side.
"""

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
END: Any = object()


def ahead(items: Generator[T]) -> Generator[T]:
    """The same items in the same order, each made while the one before it is used; what goes wrong is raised in its place."""
    thread, waiting = _begin_next(items)
    try:
        while (item := waiting.result()) is not END:
            thread, waiting = _begin_next(items)
            yield item
    finally:
        thread.join()
        items.close()


def _begin_next(items: Generator[T]) -> tuple[Thread, Future[T]]:
    """Make the next item, or END, in a thread of its own (a pool would refuse it while Python ends)."""
    made: Future[T] = Future()

    def make() -> None:
        try:
            made.set_result(next(items, END))
        except BaseException as error:
            made.set_exception(error)

    thread = Thread(target=make, name="backstory-ahead", daemon=True)
    thread.start()
    return thread, made


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
    before = {name: os.environ[name] for name in ONE_THREAD if name in os.environ}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name in ONE_THREAD:
            del os.environ[name]
        os.environ.update(before)
