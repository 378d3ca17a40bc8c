"""One writer at a time, and no lock that outlives its holder."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.store.builders import new_run, python

from backstory.errors import LockedError
from backstory.store import RunStore
from backstory.store.lock import RunLock


def test_a_second_writer_in_this_process_is_refused(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 2):
        with pytest.raises(LockedError, match=rf"written by process {os.getpid()} on .*choose another path"):
            RunStore.open(tmp_path / "run", write=True)
        assert RunStore.open(tmp_path / "run").n_steps() == 2
    RunStore.open(tmp_path / "run", write=True).close()


def test_a_second_writer_in_another_process_is_refused(tmp_path: Path) -> None:
    code = "from backstory.store import RunStore\nRunStore.open(sys.argv[1], write=True)"
    with new_run(tmp_path / "run"):
        _, error = python(code, tmp_path / "run").communicate(timeout=60)
    assert "LockedError" in error


def test_the_lock_ends_with_its_process_even_if_a_forked_worker_lives_on(tmp_path: Path) -> None:
    code = """
import os, time, warnings
from pathlib import Path
from backstory.store.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.close(1); os.close(2)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    parent = python(code, tmp_path)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with pytest.raises(LockedError):
            RunLock(tmp_path)
        parent.kill()
        parent.communicate()
        os.kill(child, 0)  # the worker is still there
        _acquire_soon(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def _acquire_soon(path: Path) -> RunLock:
    """A just-killed process needs a moment to go."""
    for _ in range(20):
        try:
            return RunLock(path)
        except LockedError:
            time.sleep(0.05)
    return RunLock(path)


def test_a_child_that_ends_does_not_free_the_lock_of_its_parent(tmp_path: Path) -> None:
    code = """
import os
from pathlib import Path
from backstory.errors import LockedError
from backstory.store.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    lock.release()
    os._exit(0)
os.waitpid(child, 0)
try:
    RunLock(Path(sys.argv[1]))
except LockedError:
    print("still held")
"""
    out, _ = python(code, tmp_path).communicate(timeout=60)
    assert out == "still held\n"


def test_releasing_twice_is_fine(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.release()
    lock.release()
    assert not lock.held
    RunLock(tmp_path).release()
