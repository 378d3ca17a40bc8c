"""Small files: atomic, durable, and clear about what went wrong."""

import os
from pathlib import Path

import pytest
import torch

from backstory.errors import DiskError, StoreError, UsageError
from backstory.store import files


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
    with pytest.raises(UsageError, match="Choose another name"):
        files.check_name(name)


def test_damaged_files_say_which(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(StoreError, match=r"a\.json cannot be read"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(StoreError, match="holds a JSON list"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "t.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(StoreError, match="is damaged"):
        files.read_tensors(tmp_path / "t.safetensors")
    with pytest.raises(StoreError, match="it holds: t"):
        files.read_tensors(tmp_path / "u.safetensors")


@pytest.mark.parametrize("code", [27, 28, 122])
def test_a_full_disk_is_known_by_number_and_by_text(code: int) -> None:
    assert files.disk_full(OSError(code, "x"))
    assert files.disk_full(OSError(f"LanceError(IO): write failed (os error {code}), /x.rs:1"))
    assert not files.disk_full(OSError(2, "No such file"))
    assert not files.disk_full(OSError("(os error 2)"))
