"""A queue with a limit: what costs time runs in threads beside the event loop, and only so much of it.

Four lanes, so that nobody waits for something short behind something long: look-ups and queries of the model share a few
threads each, what sweeps over the run takes turns in one, what replays training in another. A job that could not be done in its time, for
what is before it in its lane takes too long, is refused. One that takes too long is answered with an error: its result is cached for the next who
asks and it goes on, or nothing is cached and it is cancelled: it carries a flag in its thread, which its parts look at between them.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from threading import Event, Lock
from typing import Any, TypeVar

from .errors import Refusal

QUICK, QUERY, SWEEP, REPLAY = "quick", "query", "sweep", "replay"
THREADS = {QUICK: 2, QUERY: 2, SWEEP: 1, REPLAY: 1}
CACHED = "Try again: the computation continues in the background. Start the service with a larger --timeout for slow queries."
LOST = "It was cancelled. Send a shorter text, query the final model, leave out replay, or start the service with a larger --timeout."
T = TypeVar("T")
_flag: ContextVar[Event | None] = ContextVar("backstory_cancelled", default=None)


class Stopping(Refusal):
    """The service stops; work in progress is cancelled."""

    def __init__(self) -> None:
        super().__init__(503, "the service is stopping.", "Try again once it is back.", {"Retry-After": "5"})


class Cancelled(Refusal):
    """The time of a query has passed; nobody waits for its result."""

    def __init__(self) -> None:
        super().__init__(503, "the query was cancelled: it exceeded the time limit.", "Query less, or try again.")


def cancel_on(flag: Event, job: Callable[[], T]) -> Callable[[], T]:
    """The job, cancelled at its next `check_cancelled` once the flag is set."""

    def run() -> T:
        before = _flag.set(flag)
        try:
            check_cancelled()
            return job()
        finally:
            _flag.reset(before)

    return run


def check_cancelled() -> None:
    """Called between the parts of some work: ends it where nobody waits for it."""
    flag = _flag.get()
    if flag is not None and flag.is_set():
        raise Cancelled


class Lane:
    """One kind of work: its threads, what waits or runs in it, and how long such work took of late."""

    def __init__(self, name: str, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool, self._threads, self._clock = ThreadPoolExecutor(threads, f"backstory-{name}"), threads, clock
        self._jobs: dict[object, Hashable] = {}  # what each is about; the same is computed once
        self._began: dict[object, float] = {}
        self._took: deque[float] = deque(maxlen=8)

    def enter(self, key: Hashable | None) -> object:
        """A job's place; `key` names what it computes, None what nobody else computes."""
        place = object()
        self._jobs[place] = place if key is None else key
        return place

    def timed(self, place: object, job: Callable[[], T]) -> Callable[[], T]:
        """The job, with the time that it takes."""

        def run() -> T:
            began = self._began[place] = self._clock()
            try:
                return job()
            finally:
                self._took.append(self._clock() - began)
                self._began.pop(place, None)

        return run

    def leave(self, place: object) -> None:
        """It has ended, or was never begun."""
        self._jobs.pop(place, None)

    def expected(self, key: Hashable | None) -> float:
        """Seconds until a job that comes now would be done, as far as is known; 0 where a thread is free for it."""
        others = len({job for job in self._jobs.values() if job != key})
        if others < self._threads:
            return 0.0
        running = max((self._clock() - began for began in list(self._began.values())), default=0.0)
        usual = sum(self._took) / len(self._took) if self._took else running
        mine = 0.0 if key is not None and key in self._jobs.values() else usual
        return others // self._threads * max(running, usual) + mine


class Work:
    """Jobs that wait or run, `limit` in all."""

    def __init__(self, limit: int = 32, timeout: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.timeout = limit, timeout
        self.busy = 0  # jobs that wait or run
        self._lock, self._closed = Lock(), False
        self._lanes = {name: Lane(name, n, clock) for name, n in THREADS.items()}

    async def do(
        self,
        job: Callable[[], T],
        *,
        lane: str = QUICK,
        timeout: float | None = None,
        keeps: bool = True,
        key: Hashable | None = None,
    ) -> T:
        """The result of a job; refused with 429 where there is no room for it, with 503 where it takes too long.

        `keeps`: whether what it computes is cached, so that it is worth going on with; `key` names what it computes.
        """
        wait, flag = self.timeout if timeout is None else timeout, Event()
        future = self._submit(job if keeps else cancel_on(flag, job), lane, wait, key)
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({waiting}, timeout=wait)
        if done:
            return waiting.result()
        flag.set()
        future.cancel()  # if it has not begun
        waiting.add_done_callback(_quiet)
        headers = {"Retry-After": "5"} if keeps else {}
        raise Refusal(503, f"the result was not ready within {wait:g} s.", CACHED if keeps else LOST, headers)

    def _submit(self, job: Callable[[], T], lane: str, wait: float, key: Hashable | None) -> Future[T]:
        queue = self._lanes[lane]
        with self._lock:
            if self._closed:
                raise Stopping
            self._need_room(queue.expected(key), wait)
            place = queue.enter(key)
            future = queue.pool.submit(queue.timed(place, job))
            self.busy += 1
        future.add_done_callback(lambda _: self._ended(queue, place))
        return future

    def _need_room(self, expected: float, wait: float) -> None:
        if self.busy >= self.limit:
            raise Refusal(
                429,
                f"{self.busy} requests are queued or running (limit {self.limit}).",
                "Try again in a moment, or start the service with a larger --queue.",
                {"Retry-After": "1"},
            )
        if expected > wait:
            raise Refusal(
                429,
                f"busy: about {expected:.0f} s of work is queued (limit {wait:g} s).",
                "Try again later, or start the service with a larger --timeout.",
                {"Retry-After": str(max(1, math.ceil(expected - wait)))},
            )

    def _ended(self, lane: Lane, place: object) -> None:
        with self._lock:
            lane.leave(place)
            self.busy -= 1

    def close(self) -> None:
        """Take no more jobs; what has not begun is dropped."""
        with self._lock:
            self._closed = True
        for lane in self._lanes.values():
            lane.pool.shutdown(wait=False, cancel_futures=True)


def _quiet(future: asyncio.Future[Any]) -> None:
    """An error that nobody waits for any more is seen, so that asyncio does not complain of it."""
    if not future.cancelled():
        future.exception()
