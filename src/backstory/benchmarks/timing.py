"""Interleaved timing: candidates take turns, and the medians are compared.

Knows nothing of what is timed.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Times(NamedTuple):
    """Medians in seconds."""

    wall: float
    cpu: float


def interleave(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Run all candidates in turn, once to warm up and then `repeats` times; medians of wall and CPU time."""
    wall: dict[str, list[float]] = {name: [] for name in candidates}
    cpu: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name, work in candidates.items():
            began, used = time.perf_counter(), time.process_time()
            work()
            if turn:
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
    return {n: Times(statistics.median(wall[n]), statistics.median(cpu[n])) for n in candidates}
