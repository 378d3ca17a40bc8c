"""Freed memory stays with the process where the C library is glibc."""

import platform
import subprocess
import sys

import pytest

from backstory.exact.memory import keep_freed_memory

CHURN = """
import resource, torch
from backstory.exact.memory import keep_freed_memory
keep_freed_memory()
def churn():
    blocks = [torch.zeros(1 << 20) + 1 for _ in range(24)]  # 4 MB each
for _ in range(3):
    churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    done = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_not_faulted_in_again() -> None:
    assert faults() < 7_000, "blocks of 73,728 pages in all were taken again"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory.__wrapped__()
