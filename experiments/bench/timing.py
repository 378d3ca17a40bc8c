"""Interleaved timing: candidates take turns, and the medians are compared; the highest memory of a process."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Times:
    """Run once."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return Times(time.perf_counter() - began, time.process_time() - used)


def turns(candidates: Mapping[str, Callable[[], object]], n: int) -> dict[str, list[Times]]:
    """Run all candidates in turn, n times; every single time."""
    result: dict[str, list[Times]] = {name: [] for name in candidates}
    for _ in range(n):
        for name, work in candidates.items():
            result[name].append(timed(work))
    return result


def interleave(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Run all candidates in turn, once to warm up and then `repeats` times; medians of wall and CPU time."""
    return {name: median(result[1:]) for name, result in turns(candidates, repeats + 1).items()}


def median(result: Sequence[Times]) -> Times:
    """Medians of wall and of CPU time, each by itself."""
    return Times(statistics.median(t.wall for t in result), statistics.median(t.cpu for t in result))


def total(result: Sequence[Times]) -> Times:
    """Sums."""
    return Times(sum(t.wall for t in result), sum(t.cpu for t in result))


def peak_bytes() -> int:
    """The highest memory of this process. Linux's own count: ru_maxrss begins at what the parent had."""
    status = Path("/proc/self/status")
    if status.exists():
        result = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(result[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
