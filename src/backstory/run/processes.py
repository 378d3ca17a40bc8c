"""Work spread over fresh processes of one thread each."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

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
