"""One writer at a time: an exclusive `flock` on the file `lock` of a run.

The kernel frees it when the process dies, even by `kill -9`. A forked child (a DataLoader worker)
would inherit the lock and keep it alive after its parent; so every child closes its copy at once.
"""

import fcntl
import os
import socket
import weakref
from pathlib import Path

from ..errors import LockedError


class RunLock:
    """The held lock of one run; free it with `release`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "another process"
            self._close()
            raise LockedError(
                f"{folder} is being written by {holder}; expected no other writer. "
                "Wait until it ends, or stop it, or choose another path."
            ) from error
        self._sign()
        _HELD.add(self)

    def _sign(self) -> None:
        """Leave a name in the file, for the message that another writer will see."""
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds without the name

    @property
    def held(self) -> bool:
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


_HELD: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
