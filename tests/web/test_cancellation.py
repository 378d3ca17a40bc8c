"""Work that nobody waits for is given up, in its own thread alone."""

import threading

import pytest

from backstory.web.cancellation import GivenUp, carrying, look


def test_a_job_is_given_up_once_its_flag_is_set() -> None:
    flag, seen = threading.Event(), list[int]()

    def job() -> None:
        for k in range(5):
            look()
            seen.append(k)
            if k == 1:
                flag.set()

    with pytest.raises(GivenUp) as error:
        carrying(flag, job)()
    assert (seen, error.value.code) == ([0, 1], 503)


def test_one_that_comes_too_late_does_not_begin() -> None:
    flag, begun = threading.Event(), list[int]()
    flag.set()
    with pytest.raises(GivenUp):
        carrying(flag, lambda: begun.append(1))()
    assert begun == []


def test_what_comes_after_carries_nothing() -> None:
    flag = threading.Event()
    assert carrying(flag, lambda: "done")() == "done"
    flag.set()
    look()
