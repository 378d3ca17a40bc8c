"""The writing thread: never loses a step silently, never hangs."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.store.builders import new_run, python, record, records, rows_of

from backstory.errors import DiskError, StoreError
from backstory.store import RunStore, StepRecord, Writer


class Slow:
    """A store that notes commits, waits for a permit, and fails when told to."""

    def __init__(self) -> None:
        self.commits: list[list[int]] = []
        self.permit = threading.Event()
        self.error: BaseException | None = None

    def append(self, batch: Sequence[StepRecord]) -> None:
        assert self.permit.wait(10)
        if self.error is not None:
            raise self.error
        self.commits.append([r.step for r in batch])


def writer_of(store: Slow, **options: float) -> Writer:
    return Writer(store, **options)  # type: ignore[arg-type]


def test_everything_put_is_there_after_close(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", encoding="float64") as store:
        writer = Writer(store, commit_steps=7)
        for r in records(0, 40):
            writer.put(r)
        writer.close()
        writer.close()
        with pytest.raises(StoreError, match="closed"):
            writer.put(record(40))
    reader = RunStore.open(tmp_path / "run")
    rows = reader.read(0, reader.n_rows(), dtype=torch.float64).rows
    assert rows is not None
    assert torch.equal(rows, rows_of(0, 40))
    assert reader.verify() == []


def test_flush_commits_what_was_put_and_goes_on(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        writer = Writer(store)
        writer.flush()
        for hi in (3, 5):
            for r in records(store.n_steps(), hi):
                writer.put(r)
            writer.flush()
            assert RunStore.open(tmp_path / "run").n_steps() == hi
        writer.close()


def test_commits_are_large_and_bounded() -> None:
    store = Slow()
    writer = writer_of(store, commit_steps=4, commit_seconds=60)
    for r in records(0, 10):
        writer.put(r)
    store.permit.set()
    writer.close()
    assert store.commits == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_waiting_step_is_committed_when_it_is_old() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, commit_seconds=0.05)
    writer.put(record(0))
    for _ in range(100):
        if store.commits:
            break
        time.sleep(0.02)
    assert store.commits == [[0]]
    writer.close()


def test_put_waits_only_while_the_queue_is_full() -> None:
    store = Slow()
    size = record(0, size=2).nbytes
    writer = writer_of(store, queue_bytes=3 * size, commit_steps=1)
    for t in range(3):
        writer.put(record(t, size=2))
    blocked = threading.Thread(target=writer.put, args=(record(3, size=2),))
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive(), "a fourth step fitted into a queue of three"
    store.permit.set()
    blocked.join(10)
    assert not blocked.is_alive()
    writer.close()
    assert [t for commit in store.commits for t in commit] == [0, 1, 2, 3]


def test_a_step_larger_than_the_queue_passes() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, queue_bytes=1, commit_seconds=60)
    for t in range(3):
        writer.put(record(t))
    writer.close()
    assert store.commits == [[0], [1], [2]]


@pytest.mark.parametrize("error", [DiskError("full"), ValueError("odd"), SystemExit(1)])
def test_a_failure_reaches_every_later_call(error: BaseException) -> None:
    store = Slow()
    store.error = error
    writer = writer_of(store, commit_steps=1)
    for t in range(2):
        writer.put(record(t))
    store.permit.set()
    expected = "full" if isinstance(error, DiskError) else "steps 0 to 0 were not saved"
    with pytest.raises(StoreError, match=expected):
        writer.flush()
    with pytest.raises(StoreError, match=expected):
        writer.put(record(2))
    with pytest.raises(StoreError, match=expected):
        writer.close()
    writer.close()
    assert store.commits == []
    assert not writer._queue, "steps that will never be written still hold memory"


def test_a_blocked_put_is_freed_by_a_failure() -> None:
    store = Slow()
    store.error = DiskError("full")
    writer = writer_of(store, commit_steps=1, queue_bytes=1)
    writer.put(record(0))
    threading.Timer(0.1, store.permit.set).start()
    with pytest.raises(DiskError, match="full"):
        writer.put(record(1))
    with pytest.raises(DiskError):
        writer.close()


def test_a_wrong_record_is_reported(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        writer = Writer(store)
        writer.put(record(0))
        writer.put(record(2))
        with pytest.raises(StoreError, match="got step 2"):
            writer.close()
        assert store.n_steps() == 0


def test_a_record_is_made_while_training_goes_on_and_one_at_a_time() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, commit_seconds=60)
    go, made = threading.Event(), []

    def make(t: int) -> StepRecord:
        assert go.wait(30)
        made.append((t, threading.current_thread() is threading.main_thread()))
        return record(t)

    writer.put_later(0, lambda: make(0))
    assert not made, "put_later() returns before the record is made"
    second = threading.Thread(target=writer.put_later, args=(1, lambda: make(1)))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "two steps wait to be made"
    go.set()
    second.join(10)
    writer.wait_made()
    assert made == [(0, False), (1, False)]
    writer.put(record(2))
    writer.close()
    assert [t for commit in store.commits for t in commit] == [0, 1, 2]


def test_work_that_a_record_needs_is_done_before_it_and_little_of_it_waits() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, commit_seconds=60, ahead_bytes=10)
    go, done = threading.Event(), list[str]()

    def work(name: str) -> None:
        assert go.wait(30)
        done.append(name)

    def make() -> StepRecord:
        done.append("record")
        return record(0)

    writer.put_ahead(0, lambda: work("a"), 25)  # more than may wait: it does not wait for itself
    second = threading.Thread(target=writer.put_ahead, args=(0, lambda: work("b"), 1))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "no room while the first is held"
    go.set()
    second.join(10)
    writer.put_ahead(0, lambda: work("c"), 1)
    writer.put_later(0, make)
    writer.close()
    assert done == ["a", "b", "c", "record"]
    assert store.commits == [[0]]


def test_work_that_fails_ends_the_run_before_its_step() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, commit_seconds=60)

    def fail() -> None:
        raise ValueError("odd")

    for t in range(2):
        writer.put(record(t))
    writer.put_ahead(2, fail, 1)
    with pytest.raises(ValueError, match="odd"):
        writer.wait_made()
    writer.put_ahead(2, lambda: pytest.fail("it is left undone"), 1)
    with pytest.raises(ValueError, match="odd"):
        writer.close()
    assert writer.ends_at == 2
    assert store.commits == [[0, 1]]


def test_a_record_that_cannot_be_made_ends_the_run_before_it() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, commit_seconds=60)

    def fail() -> StepRecord:
        raise ValueError("odd")

    for t in range(3):
        writer.put(record(t))
    writer.put_later(3, fail)
    for call in (writer.wait_made, writer.check, writer.flush, lambda: writer.put(record(4)), writer.close):
        with pytest.raises(ValueError, match="odd"):
            call()
    assert writer.ends_at == 3
    assert store.commits == [[0, 1, 2]], "what was made before is committed"


def test_a_failed_commit_says_where_the_run_ends() -> None:
    store = Slow()
    store.permit.set()
    writer = writer_of(store, commit_steps=2)
    for t in range(2):
        writer.put_later(t, lambda t=t: record(t))  # type: ignore[misc]
    writer.flush()
    store.error = DiskError("full")
    writer.put_later(2, lambda: record(2))
    with pytest.raises(DiskError, match="full"):
        writer.flush()
    assert writer.ends_at == 2
    with pytest.raises(DiskError, match="full"):
        writer.close()


def test_a_program_that_forgets_to_close_loses_nothing(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from backstory.store import Writer
from tests.store.builders import new_run, records
store = new_run(Path(sys.argv[1]))
writer = Writer(store)
for r in records(0, 5):
    writer.put(r)
"""
    _, error = python(code, tmp_path / "run").communicate(timeout=60)
    assert error == ""
    assert RunStore.open(tmp_path / "run").n_steps() == 5


def test_a_forked_child_neither_hangs_nor_writes(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from backstory.errors import BackstoryError
from backstory.store import Writer
from tests.store.builders import new_run, records
store = new_run(Path(sys.argv[1]))
writer = Writer(store)
for r in records(0, 3):
    writer.put(r)
if os.fork() == 0:
    try:
        writer.flush()
    except BackstoryError as error:
        print("flush refused" if "forked" in str(error) else error)
    try:
        store.append(records(0, 1))
    except BackstoryError as error:
        print("append refused" if "fork" in str(error) else error)
    writer.close()
    store.close()
    sys.exit(0)
os.wait()
writer.close()
store.close()
print(store.n_steps())
"""
    out, error = python(code, tmp_path / "run").communicate(timeout=60)
    assert out.split("\n") == ["flush refused", "append refused", "3", ""], error
