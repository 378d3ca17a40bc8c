"""Whether work is still wanted: a question that nobody waits for any more is given up, and everything when the service ends.

A job that keeps nothing carries a flag in the thread that does it; its parts look at the flag between them.
"""

from collections.abc import Callable
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

from .errors import Refused

T = TypeVar("T")
_flag: ContextVar[Event | None] = ContextVar("backstory_given_up", default=None)


class Stopped(Refused):
    """The service ends; work in progress is given up."""

    def __init__(self) -> None:
        super().__init__(503, "the service ends.", "Ask again once it has been started again.", {"Retry-After": "5"})


class GivenUp(Refused):
    """The time of a question has passed; nobody waits for its answer."""

    def __init__(self) -> None:
        super().__init__(503, "the question was given up, for its time had passed.", "Ask again, for less.")


def carrying(flag: Event, job: Callable[[], T]) -> Callable[[], T]:
    """The job, given up at its next `look` once the flag is set."""

    def run() -> T:
        before = _flag.set(flag)
        try:
            look()
            return job()
        finally:
            _flag.reset(before)

    return run


def look() -> None:
    """Called between the parts of some work: ends it where nobody waits for it."""
    flag = _flag.get()
    if flag is not None and flag.is_set():
        raise GivenUp
