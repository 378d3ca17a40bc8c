"""Makes and writes the records of steps in the background, while training continues.

A record may be handed over as it is, or as a function that makes it: one at a time, so that what a step holds until its
record is made (activations, output gradients) is let go one step later than otherwise, and no more. Work that goes before it, such as
projecting a part of these, is done in order, and no more bytes wait for it than `ahead_bytes`. Records wait in a queue of
bounded size, and are committed when there are enough of them, or they are old enough, or someone waits. One thread makes and
one commits, since training would else wait out each commit (5 ms of a step of 29 ms, for the net of the benchmarks), with one
lock and one way to fail: the first failure ends both, and every later call raises it; what was made before it is committed.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import BackstoryError, StoreError
from .run_store import RunStore
from .schema import StepRecord

Make = Callable[[], StepRecord]
Work = Callable[[], object]


class Job(NamedTuple):
    """What the first thread does: make the record of a step, or something that goes before it."""

    step: int
    work: Work  # gives the record, where it makes one
    makes: bool
    nbytes: int = 0  # that are held until it is done


class Writer:
    """Makes and writes the steps of `store` in the background."""

    def __init__(
        self,
        store: RunStore,
        *,
        queue_bytes: int = 256 << 20,
        commit_steps: int = 50,
        commit_bytes: int = 48 << 20,
        commit_seconds: float = 10.0,
        ahead_bytes: int = 32 << 20,
    ) -> None:
        self._store = store
        self._queue_bytes = queue_bytes
        self._commit_steps, self._commit_bytes, self._commit_seconds = commit_steps, commit_bytes, commit_seconds
        self._ahead_bytes = ahead_bytes
        self._jobs: deque[Job] = deque()  # the first is under way; at most one makes a record, the last
        self._queue: deque[tuple[float, StepRecord]] = deque()
        self._bytes = 0  # in the queue and in the commit under way
        self._busy = False  # a commit is under way
        self._urgent = 0  # callers that wait for commits
        self._closing = False
        self._closed = False
        self._error: BaseException | None = None
        self.ends_at: int | None = None  # after a failure: the first step that is not in the run
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=work, name=f"backstory-{name}", daemon=True)
            for name, work in (("rows", self._make_all), ("writer", self._commit_all))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def put(self, record: StepRecord) -> None:
        """Hand one step over; waits only while the queue is full."""
        with self._changed:
            self._check_open()
            self._wait(lambda: not self._jobs, urgent=False)
            self._wait(lambda: self._has_room(record))
            self._check_open()
            self._enqueue(record)

    def put_later(self, step: int, make: Make) -> None:
        """Hand over how a step's record is made; waits until the record before it is made."""
        with self._changed:
            self._check_open()
            self._wait(lambda: not any(job.makes for job in self._jobs), urgent=False)
            self._check_open()
            self._jobs.append(Job(step, make, True))
            self._changed.notify_all()

    def put_ahead(self, step: int, work: Work, nbytes: int) -> None:
        """Have something done that the record of this step needs, and that holds so many bytes until it is; after a failure it is left undone."""
        with self._changed:
            self._wait(lambda: self._held() == 0 or self._held() + nbytes <= self._ahead_bytes, urgent=False)
            if self._error is None and not self._closing:
                self._jobs.append(Job(step, work, False, nbytes))
                self._changed.notify_all()

    def check(self) -> None:
        """Raise what went wrong, if anything has."""
        if self._error is not None:
            raise self._error

    def wait_made(self) -> None:
        """Wait until the records of all steps are made."""
        with self._changed:
            self._wait(lambda: not self._jobs, urgent=False)
            self.check()

    def flush(self) -> None:
        """Wait until everything put so far is committed."""
        with self._changed:
            self._wait(lambda: not self._jobs, urgent=False)
            self._wait(lambda: not self._queue and not self._busy)
            self.check()

    def close(self) -> None:
        """Commit what waits, end the threads and raise what went wrong; a second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.check()

    def _check_open(self) -> None:
        self.check()
        if self._closing:
            raise StoreError("the writer is closed, so this step was not saved. Open the run again to record more.")

    def _has_room(self, record: StepRecord) -> bool:
        return self._bytes == 0 or self._bytes + record.nbytes <= self._queue_bytes

    def _held(self) -> int:
        return sum(job.nbytes for job in self._jobs)

    def _enqueue(self, record: StepRecord) -> None:
        self._queue.append((time.monotonic(), record))
        self._bytes += record.nbytes
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], *, urgent: bool = True) -> None:
        """Wait for `ready`, a failure, or the end of the threads; where it is urgent, commits do not wait for more steps."""
        if ready():
            return
        self._urgent += urgent
        if urgent:
            self._changed.notify_all()
        try:
            while not ready() and self._error is None and self._threads[-1].is_alive():
                self._changed.wait(0.5)
        finally:
            self._urgent -= urgent
        if self._error is None and not ready():
            self._error = StoreError(
                "the writer's threads have stopped (was the process forked?), so queued steps were not saved. Record "
                "in the process that opened the run, and resume from the last committed step."
            )

    def _make_all(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._closing):
                    self._changed.wait()
                if not self._jobs:
                    return
                job = self._jobs[0]
            self._do(job)
            del job
            with self._changed:
                if self._jobs:
                    self._jobs.popleft()
                self._changed.notify_all()

    def _do(self, job: Job) -> None:
        try:
            made = job.work()
        except BaseException as error:
            self._fail(error, job.step)
            return
        if isinstance(made, StepRecord):
            with self._changed:
                self._wait(lambda: self._has_room(made))
                if self._error is None:
                    self._enqueue(made)

    def _commit_all(self) -> None:
        while True:
            with self._changed:
                while (patience := self._patience()) != 0 and not (self._closing and not self._jobs):
                    self._changed.wait(patience)
                batch = self._take()
                self._busy = bool(batch)
            if not batch or not self._commit(batch):
                return

    def _commit(self, batch: list[StepRecord]) -> bool:
        """Write a batch; whether that went well."""
        try:
            self._store.append(batch)
        except BackstoryError as error:
            self._fail(error, batch[0].step, lost=True)
        except BaseException as error:
            wrapped = StoreError(
                f"steps {batch[0].step} to {batch[-1].step} were not saved: {error!r}. All committed steps are "
                "intact; resume the run from there."
            )
            wrapped.__cause__ = error
            self._fail(wrapped, batch[0].step, lost=True)
        with self._changed:
            self._busy = False
            self._bytes -= sum(record.nbytes for record in batch)
            self._changed.notify_all()
            return self._error is None or bool(self._queue)

    def _fail(self, error: BaseException, step: int, *, lost: bool = False) -> None:
        """The run ends before `step`; records that were made before it are lost where a commit has failed."""
        with self._changed:
            if self._error is None or lost:
                self._error, self.ends_at = error, step
            self._closing = True
            self._jobs.clear()
            if lost:
                self._queue.clear()
            self._changed.notify_all()

    def _patience(self) -> float | None:
        """Seconds until what waits should be committed: 0 for now, None where nothing waits."""
        if not self._queue:
            return None
        if self._urgent or len(self._queue) >= self._commit_steps or self._bytes >= self._commit_bytes:
            return 0.0
        return max(0.0, self._queue[0][0] + self._commit_seconds - time.monotonic())

    def _take(self) -> list[StepRecord]:
        """The next commit: at most `commit_steps` steps and about `commit_bytes`."""
        batch: list[StepRecord] = []
        size = 0
        while self._queue and len(batch) < self._commit_steps and size < self._commit_bytes:
            batch.append(self._queue.popleft()[1])
            size += batch[-1].nbytes
        return batch
