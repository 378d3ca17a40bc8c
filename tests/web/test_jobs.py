"""The queue has a limit, says so, and nobody waits behind a sweep for a quick answer."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from backstory.web.errors import Refusal
from backstory.web.jobs import (
    QUERY,
    QUICK,
    REPLAY,
    SWEEP,
    Cancelled,
    Lane,
    Stopping,
    Work,
    cancel_on,
    check_cancelled,
)


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
        with pytest.raises(Refusal, match="limit 2") as error:
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
        with pytest.raises(Refusal, match="not ready within 1 s") as error:
            await work.do(job, lane=SWEEP)
        assert error.value.code == 503
        assert begun.is_set()
        assert work.busy == 1
        with pytest.raises(Refusal):
            await work.do(lambda: "waits behind it", lane=SWEEP, timeout=0.02)
        assert work.busy == 1  # the one that had not begun is gone
        go.set()
        assert await work.do(lambda: "next", lane=SWEEP, timeout=20) == "next"
        work.close()

    asyncio.run(main())


@pytest.mark.parametrize(("long", "short"), [(SWEEP, QUICK), (REPLAY, QUICK), (REPLAY, SWEEP), (SWEEP, QUERY)])
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


def test_questions_to_the_model_do_not_hold_up_look_ups() -> None:
    async def main() -> None:
        work, (_, go, job) = Work(limit=8, timeout=20), blocked()
        running = [asyncio.ensure_future(work.do(job, lane=QUERY)) for _ in range(4)]
        await asyncio.sleep(0)
        assert await work.do(lambda: "found") == "found"
        go.set()
        assert await asyncio.gather(*running) == ["done"] * 4
        work.close()

    asyncio.run(main())


def test_what_keeps_nothing_is_given_up_when_its_time_has_passed() -> None:
    ended = list[Exception]()

    def job() -> None:
        try:
            while True:
                check_cancelled()
        except Cancelled as error:
            ended.append(error)
            raise

    async def main() -> None:
        work = Work(limit=8, timeout=0.05)
        with pytest.raises(Refusal, match="not ready within") as error:
            await work.do(job, keeps=False)
        assert "cancelled" in error.value.hint
        assert "kept" not in error.value.hint
        assert "Retry-After" not in error.value.headers
        while work.busy:
            await asyncio.sleep(0.001)
        work.close()

    asyncio.run(main())
    assert len(ended) == 1


def test_a_lane_says_how_long_a_new_job_would_take() -> None:
    now = [0.0]
    lane = Lane("sweep", 1, clock=lambda: now[0])
    assert lane.expected(None) == 0

    def ten() -> None:
        now[0] += 10

    first = lane.enter("timeline")
    lane.timed(first, ten)()
    assert lane.expected("timeline") == 0  # the same is computed once
    assert lane.expected("sources") == 20  # what is before it, and itself
    lane.enter("timeline")
    lane.enter(None)
    assert lane.expected("sources") == 30
    assert lane.expected("timeline") == 10
    lane.leave(first)
    assert lane.expected(None) == 30


def test_one_that_runs_long_counts_with_its_time_so_far() -> None:
    now, (begun, go, job) = [0.0], blocked()
    lane = Lane("sweep", 1, clock=lambda: now[0])
    future = lane.pool.submit(lane.timed(lane.enter(None), job))
    assert begun.wait(20)
    now[0] = 25.0
    assert lane.expected(None) == 50
    go.set()
    assert future.result(20) == "done"


def test_where_a_thread_is_free_nothing_is_waited_for() -> None:
    now, (begun, go, job) = [0.0], blocked()
    lane = Lane("ask", 2, clock=lambda: now[0])
    future = lane.pool.submit(lane.timed(lane.enter(None), job))
    assert begun.wait(20)
    now[0] = 100.0
    assert lane.expected(None) == 0
    lane.enter(None)
    assert lane.expected(None) == 200
    go.set()
    assert future.result(20) == "done"


def test_more_than_can_be_done_in_time_is_not_taken() -> None:
    now = [0.0]

    async def main() -> None:
        work, (begun, go, job) = Work(limit=8, timeout=30, clock=lambda: now[0]), blocked()
        running = asyncio.ensure_future(work.do(job, lane=SWEEP, key="timeline"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        now[0] = 20.0
        with pytest.raises(Refusal, match="about 40 s") as error:
            await work.do(lambda: "never", lane=SWEEP, key="sources")
        assert (error.value.code, error.value.headers["Retry-After"]) == (429, "10")
        same = asyncio.ensure_future(work.do(lambda: "the same", lane=SWEEP, key="timeline"))
        await asyncio.sleep(0)
        assert await work.do(lambda: "soon") == "soon"
        go.set()
        assert (await running, await same) == ("done", "the same")
        assert work.busy == 0
        work.close()

    asyncio.run(main())


def test_after_the_end_a_job_is_refused_plainly() -> None:
    async def main() -> None:
        work = Work()
        work.close()
        with pytest.raises(Stopping, match="the service is stopping"):
            await work.do(lambda: "never")
        assert work.busy == 0

    asyncio.run(main())


def test_a_job_is_cancelled_once_its_flag_is_set() -> None:
    flag, done = threading.Event(), list[int]()

    def job() -> None:
        for k in range(5):
            check_cancelled()
            done.append(k)
            if k == 1:
                flag.set()

    with pytest.raises(Cancelled) as error:
        cancel_on(flag, job)()
    assert (done, error.value.code) == ([0, 1], 503)


def test_one_that_comes_too_late_does_not_begin() -> None:
    flag, begun = threading.Event(), list[int]()
    flag.set()
    with pytest.raises(Cancelled):
        cancel_on(flag, lambda: begun.append(1))()
    assert begun == []


def test_what_comes_after_carries_nothing() -> None:
    flag = threading.Event()
    assert cancel_on(flag, lambda: "done")() == "done"
    flag.set()
    check_cancelled()
