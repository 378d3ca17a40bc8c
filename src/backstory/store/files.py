"""Small files of a run (JSON, safetensors, the warm-up spool, the lock), written so that a crash leaves the old one or the new one.

Every write goes to a temporary file in the same folder, is flushed to the disk, renamed over the
old one, and the folder is flushed too. A full disk becomes a `DiskError`.
"""

import errno
import fcntl
import json
import os
import re
import socket
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..errors import DiskError, LockedError, StoreError, UsageError

TEMPORARY = ".tmp"
CHECKS = "crc32"  # of each tensor, in a file's metadata
NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SPOOLED = re.compile(r"step-(\d{8,})\.safetensors")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_name(name: str) -> str:
    """`name` if it can be a file name on every system, else an error."""
    if not NAME.fullmatch(name) or name.startswith("."):
        raise UsageError(
            f"{name!r} is not a valid file name for a run. Use letters, digits, '_', '-' and '.', and do not start with '.'."
        )
    return name


def disk_full(error: BaseException) -> bool:
    """Whether `error` says that no more can be written (Rust libraries say it in the text only)."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return any(f"os error {code})" in str(error) or f"os error {code}," in str(error) for code in _FULL)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write of `path` into a `DiskError` (disk full) or a `StoreError`."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        if disk_full(error):
            raise DiskError(
                f"the disk is full: could not write {path}. The previous contents are unchanged. Free some space and try again."
            ) from error
        raise StoreError(f"could not write {path}: {error}. Check that the folder exists and is writable.") from error


def fsync(path: Path) -> None:
    """Flush one file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a temporary file, then put it in the place of `path`."""
    temporary = path.with_name(path.name + TEMPORARY)
    with writing(path):
        try:
            temporary.touch()
            rights = temporary.stat().st_mode  # what the user's umask allows; safetensors would make it private
            fill(temporary)
            temporary.chmod(rights)
            fsync(temporary)
            os.replace(temporary, path)
            fsync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def remove(path: Path) -> None:
    """Delete a file, if it is there, and flush its folder."""
    if path.exists():
        path.unlink()
        fsync(path.parent)


def move(file: Path, path: Path) -> None:
    """Put a finished file in the place of `path`, on the same disk."""
    with writing(path):
        os.replace(file, path)
        fsync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`value` as readable JSON."""
    text = json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"could not read {path}: {error}. Restore it from a copy of the run.") from error
    if not isinstance(value, dict):
        raise StoreError(
            f"{path} must contain a JSON object, got a {type(value).__name__}. Restore it from a copy of the run."
        )
    return value


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, *, checked: bool = False
) -> None:
    """`tensors` (tied ones are written twice) as a safetensors file; `checked` adds a checksum of each."""
    flat = _independent(tensors)
    checks = {CHECKS: json.dumps({name: _checksum(x) for name, x in flat.items()})} if checked else {}
    meta = {**(metadata or {}), **checks} or None
    write_atomic(path, lambda temporary: safetensors.torch.save_file(flat, temporary, metadata=meta))


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory, as safetensors requires."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        out[name] = plain.clone() if address in seen else plain
        seen.add(address)
    return out


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file whose names begin so, on the CPU; an error where a checksum does not fit."""
    with _reading_tensors(path), safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}
        checks = json.loads((file.metadata() or {}).get(CHECKS, "{}"))
    for name, x in tensors.items():
        if name in checks and _checksum(x) != checks[name]:
            raise StoreError(
                f"{path} has changed since it was written (checksum mismatch in {name!r}). Delete it: what it has can "
                "be computed again."
            )
    return tensors


def _checksum(x: Tensor) -> int:
    """The crc32 of its bytes."""
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data) if x.numel() else 0


def read_metadata(path: Path) -> dict[str, str]:
    """The text metadata of a safetensors file."""
    with _reading_tensors(path), safetensors.safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@contextmanager
def _reading_tensors(path: Path) -> Iterator[None]:
    if not path.exists():
        near = ", ".join(sorted(p.stem for p in path.parent.glob("*.safetensors"))) or "none"
        raise StoreError(f"{path.parent} has no {path.name}. It has: {near}.")
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise StoreError(
            f"{path} is damaged or not a safetensors file ({error}). Delete it, or restore it from a copy."
        ) from error


def size_bytes(folder: Path, without: tuple[str, ...] = ()) -> int:
    """Bytes of all files under `folder` but for names that begin so; files that vanish meanwhile count as nothing."""
    total = 0
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(without)]
        for name in names:
            with suppress(FileNotFoundError):
                total += 0 if name.startswith(without) else os.lstat(os.path.join(root, name)).st_size
    return total


MAPPED = 16  # groups of a spooled step's tensors that are read before its file is opened again


class Spool:
    """The folder `spool` of a run: whole steps as files until their projection is known.

    One safetensors file a step, with its other facts as JSON in the file's metadata; a step is there or not.
    """

    def __init__(
        self, folder: Path, check_writable: Callable[[], None], before_put: Callable[[int], None] | None = None
    ) -> None:
        self.folder, self._check_writable = folder, check_writable
        self._before_put = before_put  # called with the number of the step after the one that is put

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.safetensors"

    def put(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> int:
        """Keep one step, durably; its size in bytes."""
        self._check_writable()
        if self._before_put is not None:
            self._before_put(step + 1)
        if not self.folder.exists():
            self.folder.mkdir()
            fsync(self.folder.parent)
        write_tensors(self._file(step), tensors, {"meta": json.dumps(dict(meta))})
        return self._file(step).stat().st_size

    def steps(self) -> list[int]:
        """The steps kept, in order."""
        names = [p.name for p in self.folder.iterdir()] if self.folder.exists() else []
        return sorted(int(m[1]) for name in names if (m := _SPOOLED.fullmatch(name)))

    def get(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `put` was given."""
        return read_tensors(self._file(step)), self.meta(step)

    def meta(self, step: int) -> dict[str, Any]:
        """The other facts of a step."""
        meta: dict[str, Any] = json.loads(read_metadata(self._file(step)).get("meta", "{}"))
        return meta

    def groups(self, step: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The tensors of a step whose names differ in what follows their last "/", one group in memory at a time; groups in order."""
        file = self._file(step)
        with _reading_tensors(file), safetensors.safe_open(file, framework="pt") as tensors:
            names = sorted(name.rpartition("/")[::2] for name in tensors.keys())
        groups = [(head, [last for _, last in some]) for head, some in groupby(names, itemgetter(0))]
        for lo in range(0, len(groups), MAPPED):  # what was looked at stays mapped as long as a file is open
            with _reading_tensors(file), safetensors.safe_open(file, framework="pt") as tensors:
                for head, some in groups[lo : lo + MAPPED]:
                    yield head, {last: tensors.get_tensor(f"{head}/{last}") for last in some}

    def clear(self, from_step: int = 0) -> None:
        """Drop the steps from `from_step` on, last first: a crash leaves no gap."""
        self._check_writable()
        if not self.folder.exists():
            return
        for leftover in self.folder.glob(f"*{TEMPORARY}"):
            leftover.unlink()
        for step in reversed(self.steps()):
            if step >= from_step:
                self._file(step).unlink()
        fsync(self.folder)


class RunLock:
    """One writer at a time: an exclusive `flock` on the file `lock` of a run; free it with `release`.

    The kernel frees it when the process dies, even by `kill -9`. A forked child (a DataLoader worker)
    would inherit the lock and keep it alive after its parent; so every child closes its copy at once.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "another process"
            self._close()
            raise LockedError(
                f"{folder} is being written by {holder}. Wait for it to finish, stop it, or choose another path."
            ) from error
        with suppress(OSError):  # a name, for the message that another writer sees; on a full disk the lock has none
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        _LOCKS.add(self)

    @property
    def active(self) -> bool:
        """Whether this process still holds it."""
        return self._fd >= 0

    def release(self) -> None:
        """Free the lock; safe to call twice."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        """Close this process's copy without unlocking: the parent of a forked child goes on holding it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_LOCKS: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_LOCKS):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
