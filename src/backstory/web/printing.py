"""A page as PDF, printed by Chromium: within a time, and with nothing left behind where it fails.

Chromium is several processes. They are started as a group and ended as one, and they write what they say into a file, so that
none of them can keep us waiting.
Knows nothing of what is printed.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from ..errors import StoreError, UnsupportedError

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
SECONDS = 180.0  # for one page
ELSE = "Open the page in a browser and print it from there."


def browser() -> str:
    """The browser that prints."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UnsupportedError(f"a PDF is printed by Chromium, and none was found. Install Chromium or Chrome. {ELSE}")
    return found


def pdf(page: Path, out: Path, *, seconds: float = SECONDS) -> None:
    """A page as Chromium prints it; where that fails there is no file, not half a one."""
    name = browser()
    out.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="backstory-print-", ignore_cleanup_errors=True) as folder:
            said = _run(_command(name, folder, page, out), Path(folder) / "said.txt", seconds)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    if not out.exists():
        raise StoreError(f"{name} wrote no PDF ({said}). {ELSE}")


def _run(command: list[str], log: Path, seconds: float) -> str:
    """The end of what a command says; its processes are gone afterwards, however it ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StoreError(
                f"{command[0]} printed for {seconds:g} s and was ended; expected a PDF by then. {ELSE}"
            ) from None
        finally:
            _end(process)
    return " ".join(log.read_text(errors="replace").split())[-300:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):  # no groups here, or all of them have ended
        process.kill()
    process.wait()


def _command(name: str, folder: str, page: Path, out: Path) -> list[str]:
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    quiet = ["--headless", "--disable-gpu", "--no-first-run", "--no-pdf-header-footer", "--window-size=760,1080"]
    waits = ["--virtual-time-budget=20000", f"--user-data-dir={folder}/profile"]
    return [name, *root, *quiet, *waits, f"--print-to-pdf={out.resolve()}", page.resolve().as_uri()]
