"""Computes exact results and kills itself on the way, once for each RUN:WAY:MOMENT that is named.

A moment is a step of a replay, a step of a sweep or of tangents, or a flush to the disk. Each is a process of its own, forked before
anything is opened. At a moment that never comes, the process ends by itself.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support import examples

from backstory.exact.reverse import Sweep
from backstory.exact.tangent import Tangents
from backstory.exact.variants import Alone, Replicas
from backstory.run.run import Run
from backstory.store import files

PLACES: list[tuple[Any, str]] = [
    (Sweep, "_step_back"), (Tangents, "over"), (Alone, "step"), (Replicas, "step"), (files, "fsync"),
]  # fmt: skip


def compute(run: Run, way: str) -> Any:
    """One of the three ways."""
    if way == "reverse":
        return run.exact("q", examples.NAME, each=True)
    if way == "tangents":
        return run.tangents("parts:2", examples.NAME)
    return run.leave_out("parts:2", examples.NAME, twins=1)


def die_at(moment: int) -> None:
    """Kill this process when it comes to the moment."""
    seen = [0]

    def counted(original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            seen[0] += 1
            if seen[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **named)

        return call

    for owner, name in PLACES:
        setattr(owner, name, counted(getattr(owner, name)))


def main(named: list[str]) -> None:
    for text in named:
        path, way, moment = text.split(":")
        child = os.fork()
        if child == 0:
            die_at(int(moment))
            compute(Run(Path(path)), way)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
