"""The queue has a limit, says so, and nobody waits behind a sweep for a quick answer."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from backstory.web.errors import Refused
from backstory.web.work import QUICK, REPLAY, SWEEP, Work


def blocked() -> tuple[threading.Event, threading.Event, Callable[[], str]]:
    begun, go = threading.Event(), threading.Event()

    def job() -> str:
        begun.set()
        assert go.wait(20)
        return "done"

    return begun, go, job


def test_beyond_the_limit_a_job_is_refused_and_places_come_free() -> None:
    async def main() -> None:
        work, (_, go, job) = Work(limit=2), blocked()
        running = [asyncio.ensure_future(work.do(job)) for _ in range(2)]
        await asyncio.sleep(0)
        assert work.busy == 2
        with pytest.raises(Refused, match="limit is 2") as error:
            await work.do(lambda: "never")
        assert (error.value.code, error.value.headers["Retry-After"]) == (429, "1")
        go.set()
        assert await asyncio.gather(*running) == ["done", "done"]
        assert await work.do(lambda: "free again") == "free again"
        assert work.busy == 0
        work.close()

    asyncio.run(main())


def test_what_takes_too_long_is_told_so_and_keeps_its_place_until_it_ends() -> None:
    async def main() -> None:
        work, (begun, go, job) = Work(limit=8, timeout=1), blocked()
        with pytest.raises(Refused, match="not ready within 1 s") as error:
            await work.do(job, lane=SWEEP)
        assert error.value.code == 503
        assert begun.is_set()
        assert work.busy == 1
        with pytest.raises(Refused):
            await work.do(lambda: "waits behind it", lane=SWEEP, timeout=0.02)
        assert work.busy == 1  # the one that had not begun is gone
        go.set()
        assert await work.do(lambda: "next", lane=SWEEP, timeout=20) == "next"
        work.close()

    asyncio.run(main())


@pytest.mark.parametrize(("long", "short"), [(SWEEP, QUICK), (REPLAY, QUICK), (REPLAY, SWEEP)])
def test_nobody_waits_behind_what_takes_longer(long: str, short: str) -> None:
    async def main() -> None:
        work, (begun, go, job) = Work(limit=8, timeout=20), blocked()
        running = asyncio.ensure_future(work.do(job, lane=long))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert await work.do(lambda: "soon", lane=short) == "soon"
        assert not running.done()
        go.set()
        assert await running == "done"
        work.close()

    asyncio.run(main())


def test_an_error_reaches_who_asked() -> None:
    def fails() -> None:
        raise ValueError("no")

    async def main() -> None:
        work = Work()
        with pytest.raises(ValueError, match="no"):
            await work.do(fails)
        assert work.busy == 0
        work.close()

    asyncio.run(main())
