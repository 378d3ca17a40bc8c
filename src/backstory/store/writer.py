"""A thread that writes: training hands a step over and goes on.

Records wait in a queue of bounded size; the thread commits them when there are enough of them, or they
are old enough, or someone waits. The first failure ends the thread, and every later call raises it.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from ..errors import BackstoryError, StoreError
from .records import StepRecord
from .run_store import RunStore


class Writer:
    """Writes into `store` from a background thread."""

    def __init__(
        self,
        store: RunStore,
        *,
        queue_bytes: int = 256 << 20,
        commit_steps: int = 50,
        commit_bytes: int = 48 << 20,
        commit_seconds: float = 10.0,
    ) -> None:
        self._store = store
        self._queue_bytes = queue_bytes
        self._commit_steps, self._commit_bytes, self._commit_seconds = (
            commit_steps,
            commit_bytes,
            commit_seconds,
        )
        self._queue: deque[tuple[float, StepRecord]] = deque()
        self._held = 0  # bytes in the queue and in the commit under way
        self._busy = False  # a commit is under way
        self._urgent = 0  # callers that wait
        self._closing = False
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="backstory-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, record: StepRecord) -> None:
        """Hand one step over; waits only while the queue is full."""
        size = record.nbytes
        with self._changed:
            self._raise_pending()
            if self._closing:
                raise StoreError("the writer is closed, so this step was not kept. Open the run again to record more.")
            self._wait(lambda: self._held == 0 or self._held + size <= self._queue_bytes)
            self._raise_pending()
            self._queue.append((time.monotonic(), record))
            self._held += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything put so far is committed."""
        with self._changed:
            self._wait(lambda: not self._queue and not self._busy)
            self._raise_pending()

    def close(self) -> None:
        """Commit what waits, end the thread and raise what went wrong; a second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_pending()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait for `ready`, a failure, or the end of the thread; meanwhile commits are urgent."""
        self._urgent += 1
        self._changed.notify_all()
        try:
            while not ready() and self._error is None and self._thread.is_alive():
                self._changed.wait(0.5)
        finally:
            self._urgent -= 1
        if self._error is None and not ready():
            self._error = StoreError(
                "the writer's thread is gone (was the process forked?), so queued steps were not kept. "
                "Record in the process that opened the run, and resume it at its last committed step."
            )

    def _raise_pending(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._due() or self._closing):
                    self._changed.wait(self._patience())
                batch = self._take()
                self._busy = bool(batch)
            if not batch:
                return
            error = self._commit(batch)
            with self._changed:
                self._busy = False
                self._held -= sum(record.nbytes for record in batch)
                if error is not None:
                    self._error = error
                    self._queue.clear()
                self._changed.notify_all()
            if error is not None:
                return

    def _commit(self, batch: list[StepRecord]) -> BaseException | None:
        try:
            self._store.append(batch)
        except BackstoryError as error:
            return error
        except BaseException as error:
            wrapped = StoreError(
                f"steps {batch[0].step} to {batch[-1].step} were not kept: {error!r}. All committed steps "
                "are whole; resume the run there."
            )
            wrapped.__cause__ = error
            return wrapped
        return None

    def _due(self) -> bool:
        """Whether what waits should be committed now."""
        if not self._queue:
            return False
        if self._urgent or len(self._queue) >= self._commit_steps or self._held >= self._commit_bytes:
            return True
        return time.monotonic() - self._queue[0][0] >= self._commit_seconds

    def _patience(self) -> float | None:
        """Seconds until the oldest waiting step is due."""
        if not self._queue:
            return None
        return max(0.0, self._queue[0][0] + self._commit_seconds - time.monotonic())

    def _take(self) -> list[StepRecord]:
        """The next commit: at most `commit_steps` steps and about `commit_bytes`."""
        batch: list[StepRecord] = []
        size = 0
        while self._queue and len(batch) < self._commit_steps and size < self._commit_bytes:
            batch.append(self._queue.popleft()[1])
            size += batch[-1].nbytes
        return batch
