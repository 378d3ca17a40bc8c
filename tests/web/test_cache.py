"""What is kept is bounded, and made once however many ask."""

import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from backstory.web.jobs import Cancelled
from backstory.web.state import Cache


def test_who_waits_for_what_another_gave_up_makes_it_itself() -> None:
    kept: Cache[int] = Cache(10)
    begun, go = Event(), Event()

    def slow() -> int:
        begun.set()
        go.wait(10)
        raise Cancelled

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(kept.get, "a", slow)
        assert begun.wait(10)
        second = pool.submit(kept.get, "a", lambda: 7)
        go.set()
        assert second.result(10) == 7
        assert isinstance(first.exception(10), Cancelled)


def test_a_value_is_made_once() -> None:
    kept, made = Cache[int](4), list[int]()

    def make() -> int:
        made.append(1)
        return 7

    assert [kept.get("a", make) for _ in range(3)] == [7, 7, 7]
    assert made == [1]


def test_the_oldest_are_dropped_and_those_asked_for_stay() -> None:
    kept = Cache[str](6, len)
    kept.get("a", lambda: "aa")
    kept.get("b", lambda: "bb")
    kept.get("c", lambda: "cc")
    kept.get("a", lambda: "never")  # now `b` is the oldest
    kept.get("d", lambda: "dd")
    assert ["a" in kept, "b" in kept, "c" in kept, "d" in kept] == [True, False, True, True]


def test_one_that_is_too_large_is_still_given() -> None:
    kept = Cache[str](3, len)
    assert kept.get("a", lambda: "a" * 10) == "a" * 10
    assert kept.get("b", lambda: "b") == "b"
    assert "a" not in kept


def test_an_error_is_raised_and_not_kept() -> None:
    kept = Cache[int](4)

    def fails() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kept.get("a", fails)
    assert "a" not in kept
    assert kept.get("a", lambda: 3) == 3


def test_who_comes_meanwhile_waits_for_the_first() -> None:
    kept, begun, go, made = Cache[int](4), threading.Event(), threading.Event(), list[int]()

    def slow() -> int:
        made.append(1)
        begun.set()
        assert go.wait(20)
        return 5

    actual: list[int] = []
    threads = [threading.Thread(target=lambda: actual.append(kept.get("a", slow))) for _ in range(4)]
    threads[0].start()
    assert begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    assert "a" not in kept
    go.set()
    for thread in threads:
        thread.join(20)
    assert (actual, made) == ([5] * 4, [1])
