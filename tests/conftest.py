"""What every test needs: `tests.oracles` importable from anywhere, one thread, and files that share their fixtures."""

import os
import resource
import sys
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)

EXPERIMENTS = (
    "studies/test_*",
    "benchmarks/*",
    "cli/test_study*",
    "cli/test_bench*",
)  # what guards them runs in test-slow
PRODUCT = (
    "studies/test_demo*",
    "studies/test_digits*",
    "studies/test_text*",
)  # but for what `backstory demo` is made of


@pytest.fixture(autouse=True)
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ROUNDING=noisy, as `make test-rounding` sets it, products come out with a random last bit.

    Each test has draws of its own, the same whenever it runs: with one seed for all, what two tests compute would agree.
    """
    if os.environ.get("ROUNDING") != "noisy":
        yield
        return
    from tests.rounding import NoisyRounding

    with NoisyRounding(zlib.crc32(request.node.nodeid.encode())):
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what guards experiments, where slow tests are left out."""
    return True if "not slow" in config.option.markexpr and is_experiment(collection_path) else None


def is_experiment(path: Path) -> bool:
    file = path.relative_to(Path(__file__).parent).as_posix() if path.is_relative_to(Path(__file__).parent) else ""
    return any(fnmatchcase(file, x) for x in EXPERIMENTS) and not any(fnmatchcase(file, x) for x in PRODUCT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs the whole of a file, so that what it trains or starts is made once; one runs all that need a browser."""
    for item in items:
        if is_experiment(item.path):
            item.add_marker(pytest.mark.slow)
        browser = "browser" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("browser" if browser else str(item.path)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much processor time the tests took: it must stay under 12 minutes, whatever else the machine does."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes, seconds = divmod(sum(x.ru_utime + x.ru_stime for x in used), 60)
    terminalreporter.write_line(f"CPU time {minutes:.0f} min {seconds:.0f} s (pytest and its children, user + system)")
