"""Work in a process of its own, so that its highest memory is known: seconds, and bytes beyond an idle process.

The function is named as "module:function" and takes plain values as keywords; it returns plain values.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from backstory.errors import BackstoryError
from experiments.bench.timing import peak_bytes, timed

START = "import sys; from experiments.bench.children import main; main(*sys.argv[1:])"


def in_child(function: str, values: Mapping[str, Any], *, timeout: float = 900) -> dict[str, Any]:
    """Call `function` there: what it returned, with seconds, cpu_s and peak_bytes."""
    ready = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START, function, json.dumps(dict(values))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=ready, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise BackstoryError(f"{function} was not done after {timeout:.0f} s. Run it on a quiet machine.") from error
    if done.returncode:
        raise BackstoryError(f"{function} ended with {done.returncode}: {last_line(done.stderr)}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main(function: str, values: str) -> None:
    """What runs there; one JSON line last."""
    module, _, name = function.partition(":")
    work, asked, kept = getattr(import_module(module), name), json.loads(values), []
    times = timed(lambda: kept.append(work(**asked)))
    result = {**(kept[0] or {}), "seconds": times.wall, "cpu_s": times.cpu, "peak_bytes": peak_bytes()}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
