"""A queue with a limit: what costs time runs in threads beside the event loop, and only so much of it.

Three lanes, so that nobody waits for a quick answer behind a sweep, or for a sweep behind a replay: questions that take a moment share
a few threads, those that sweep over the run take turns in one, and those that replay training in another. A request that takes too long is told so; its work goes on and keeps its place until
it ends, for a thread cannot be stopped, and what it finds is kept for the next who asks.
Knows nothing of what is computed.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from .errors import Refused

QUICK, SWEEP, REPLAY = "quick", "sweep", "replay"
THREADS = {QUICK: 2, SWEEP: 1, REPLAY: 1}
T = TypeVar("T")


class Work:
    """Jobs that wait or run, `limit` in all."""

    def __init__(self, limit: int = 32, timeout: float = 30.0) -> None:
        self.limit, self.timeout = limit, timeout
        self._busy, self._lock = 0, Lock()
        self._lanes = {name: ThreadPoolExecutor(n, f"backstory-{name}") for name, n in THREADS.items()}

    @property
    def busy(self) -> int:
        """How many jobs wait or run."""
        return self._busy

    async def do(self, job: Callable[[], T], *, lane: str = QUICK, timeout: float | None = None) -> T:
        """The result of a job; refused with 429 where the queue is full, with 503 where it takes too long."""
        wait = self.timeout if timeout is None else timeout
        future = self._submit(job, lane)
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({waiting}, timeout=wait)
        if done:
            return waiting.result()
        future.cancel()  # if it has not begun
        waiting.add_done_callback(_quiet)
        raise Refused(
            503,
            f"the answer was not ready within {wait:g} s.",
            "Ask again: what was computed meanwhile is kept. Start the service with a larger --timeout for slow questions.",
            {"Retry-After": "5"},
        )

    def _submit(self, job: Callable[[], T], lane: str) -> Future[T]:
        with self._lock:
            if self._busy >= self.limit:
                raise Refused(
                    429,
                    f"{self._busy} questions are being answered or wait; the limit is {self.limit}.",
                    "Ask again in a moment, or start the service with a larger --queue.",
                    {"Retry-After": "1"},
                )
            self._busy += 1
        future = self._lanes[lane].submit(job)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._busy -= 1

    def close(self) -> None:
        """Take no more jobs; what has not begun is dropped."""
        for lane in self._lanes.values():
            lane.shutdown(wait=False, cancel_futures=True)


def _quiet(future: asyncio.Future[Any]) -> None:
    """An error that nobody waits for any more is seen, so that asyncio does not complain of it."""
    if not future.cancelled():
        future.exception()
