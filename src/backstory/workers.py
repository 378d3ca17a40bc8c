"""Background work: prepare the next item in a thread while the current one is used, and spread jobs over processes of our own.

Reading waits for the disk and decodes, writing encodes and waits again; between them the propagator computes. torch and the tables
let go of Python while they work, so the three can run side by side.
"""

import ctypes
import multiprocessing
import os
import platform
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
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
    size = min(workers, len(jobs))
    with _one_thread(), ProcessPoolExecutor(size, context, initializer=keep_freed_memory) as pool:
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


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the parameters of glibc's mallopt
KEPT = 1 << 30  # bytes
LARGEST = 1 << 25  # bytes of a block that old versions take from the heap


@cache
def keep_freed_memory() -> bool:
    """From now on at most 1 GiB that is freed stays with this process; False where that is not up to us. For processes of our own only.

    By default glibc gives a freed stretch of more than some MB back to the system. The products of an exact sweep free and take the same
    hundreds of MB at every step, so that each of them would be faulted in again page by page: a quarter of the time of a product for GPT 4 × 128.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool((mallopt(MMAP_THRESHOLD, KEPT) or mallopt(MMAP_THRESHOLD, LARGEST)) and mallopt(TRIM_THRESHOLD, KEPT))
