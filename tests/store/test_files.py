"""Small files survive a crash; one writer at a time; steps that wait for their projection."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.store.builders import new_run, python

from backstory.errors import DiskError, LockedError, StoreError, UsageError
from backstory.store import RunStore, files
from backstory.store.files import RunLock


def test_json_and_tensors_come_back(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"ä": [1, 2.5, None]})
    assert files.read_json(tmp_path / "a.json") == {"ä": [1, 2.5, None]}
    tied = torch.arange(6.0).reshape(2, 3)
    files.write_tensors(tmp_path / "t.safetensors", {"x": tied, "y": tied, "z": tied.T, "s": tied[1]}, {"k": "v"})
    back = files.read_tensors(tmp_path / "t.safetensors")
    assert torch.equal(back["x"], tied)
    assert torch.equal(back["z"], tied.T)
    assert torch.equal(back["s"], tied[1])
    assert files.read_metadata(tmp_path / "t.safetensors") == {"k": "v"}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"v": 1})

    def fails(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DiskError, match="Free some space"):
        files.write_atomic(path, fails)
    assert files.read_json(path) == {"v": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_every_write_reaches_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = files.fsync, os.replace

    def noted_sync(path: Path) -> None:
        done.append(f"fsync {path.name}")
        sync(path)

    def noted_replace(old: Path, new: Path) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(files, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    files.write_json(tmp_path / "a.json", {})
    assert done == ["fsync a.json.tmp", "rename", f"fsync {tmp_path.name}"]


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ü", "a\n"])
def test_names_that_cannot_be_files_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid file name"):
        files.check_name(name)


def test_damaged_files_say_which(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(StoreError, match=r"could not read .*a\.json"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(StoreError, match="must contain a JSON object, got a list"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "t.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(StoreError, match="is damaged"):
        files.read_tensors(tmp_path / "t.safetensors")
    with pytest.raises(StoreError, match=r"has no u\.safetensors\. It has: t"):
        files.read_tensors(tmp_path / "u.safetensors")


@pytest.mark.parametrize("code", [27, 28, 122])
def test_a_full_disk_is_known_by_number_and_by_text(code: int) -> None:
    assert files.disk_full(OSError(code, "x"))
    assert files.disk_full(OSError(f"LanceError(IO): write failed (os error {code}), /x.rs:1"))
    assert not files.disk_full(OSError(2, "No such file"))
    assert not files.disk_full(OSError("(os error 2)"))


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
from backstory.store.files import RunLock
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
from backstory.store.files import RunLock
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
    assert not lock.active
    RunLock(tmp_path).release()


def test_a_step_comes_back_with_its_facts(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        tensors = {"a": torch.randn(2, 3), "b/δ": torch.arange(4)}
        size = store.spool.put(0, tensors, {"clip": 0.5, "ids": ["x", "ä"]})
        assert size == (tmp_path / "run/spool/step-00000000.safetensors").stat().st_size
        store.spool.put(1, tensors, {})
    back, meta = RunStore.open(tmp_path / "run").spool.get(0)
    assert meta == {"clip": 0.5, "ids": ["x", "ä"]}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], tensors[k]) for k in tensors)


def test_clearing_drops_the_later_steps_only(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.spool.clear()
        for step in range(4):
            store.spool.put(step, {"a": torch.zeros(1)}, {})
        (tmp_path / "run/spool/step-00000009.safetensors.tmp").touch()
        assert store.spool.steps() == [0, 1, 2, 3]
        store.spool.clear(2)
        assert store.spool.steps() == [0, 1]
        assert len(list((tmp_path / "run/spool").iterdir())) == 2
        store.spool.clear()
        assert store.spool.steps() == []


def test_an_unknown_step_says_which_there_are(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.spool.put(3, {"a": torch.zeros(1)}, {})
        with pytest.raises(StoreError, match=r"has no step-00000005.* It has: step-00000003"):
            store.spool.get(5)


def test_a_damaged_step_is_found_by_verify(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.spool.put(0, {"a": torch.zeros(9)}, {})
        file = tmp_path / "run/spool/step-00000000.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
        assert ["step-00000000" in line for line in store.verify()] == [True]
