"""Work done ahead: the same items, one ahead and no more, errors in their place, and an end that leaves no thread."""

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

import pytest

from backstory.workers import ahead, keep_freed_memory, spread

T = TypeVar("T")


def each(items: Iterable[T]) -> Generator[T]:
    yield from items


def test_items_come_in_order_and_none_is_lost() -> None:
    assert list(ahead(each(range(5)))) == [0, 1, 2, 3, 4]
    assert list(ahead(each([None, None]))) == [None, None], "None is an item, not the end"
    assert list(ahead(each(()))) == []


def test_the_next_item_is_made_while_one_is_used_and_no_other() -> None:
    made: list[int] = []
    second = threading.Event()

    def items() -> Generator[int]:
        for i in range(4):
            made.append(i)
            if i == 1:
                second.set()
            yield i

    actual = ahead(items())
    assert next(actual) == 0
    assert second.wait(10), "nothing was made ahead"
    assert next(actual) == 1
    assert max(made) <= 2, "made more than one ahead: memory is bounded by that"
    assert list(actual) == [2, 3]


def test_an_error_is_raised_where_its_item_would_be() -> None:
    def items() -> Generator[int]:
        yield 1
        raise ValueError("the second")

    actual = ahead(items())
    assert next(actual) == 1
    with pytest.raises(ValueError, match="the second"):
        next(actual)


def test_what_makes_the_items_is_closed_with_it() -> None:
    closed: list[str] = []

    def items() -> Generator[int]:
        try:
            yield from range(9)
        finally:
            closed.append("closed")

    actual = ahead(items())
    next(actual)
    actual.close()
    assert closed == ["closed"]


def test_closing_early_leaves_no_thread() -> None:
    before, go = set(threading.enumerate()), threading.Event()

    def items() -> Generator[int]:
        yield 0
        go.wait(10)
        yield 1

    actual = ahead(items())
    next(actual)
    assert set(threading.enumerate()) > before
    go.set()
    actual.close()
    assert set(threading.enumerate()) == before


@pytest.mark.slow
def test_work_is_done_elsewhere_with_one_thread() -> None:
    before = dict(os.environ)
    actual = dict(spread(os.getenv, [("OMP_NUM_THREADS",), ("MKL_NUM_THREADS",)], 2))
    assert actual == {0: "1", 1: "1"}
    assert dict(os.environ) == before


CHURN = """
import resource, torch
from backstory.workers import keep_freed_memory
keep = {keep}
if keep:
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


def faults(keep: bool) -> int:
    done = subprocess.run([sys.executable, "-c", CHURN.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_not_faulted_in_again() -> None:
    assert faults(True) < faults(False) / 4


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory.__wrapped__()
