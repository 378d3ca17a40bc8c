"""A run four times as long is embedded and asked in the same memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.recording import memory_script
from tests.support.loops import sgd

import backstory
from backstory.store import RunStore, StepRecord

ROOT = Path(__file__).parents[2]
SOURCE = Path(backstory.__path__[0]).parent
BATCH = 32
KEYS = {"rate": 1e-3, "l2": 0.0, "decay": 0.0, "momentum": 0.0, "tau": 0.0, "a": 1.0, "n": 0.0}

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def pair_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Path]]:
    """A run of so many steps and one four times as long, made once for all tests."""

    @cache
    def made(steps: int) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(f"runs-{steps}")
        long_run(folder / "short", steps)
        long_run(folder / "long", 4 * steps)
        return folder / "short", folder / "long"

    return made


def long_run(path: Path, steps: int) -> None:
    """A run of noise, written without training."""
    model = memory_script.make()
    with backstory.record(model, sgd(model), path, loss_reduction="mean", projection="full", encoding="float16"):
        pass
    with RunStore.open(path, write=True) as store:
        for lo in range(0, steps, 50):
            store.append([noise(t) for t in range(lo, min(lo + 50, steps))])
        store.update_config(ids="int", fingerprints={})


def noise(t: int) -> StepRecord:
    rows = torch.randn(BATCH, memory_script.WIDTH, generator=torch.Generator().manual_seed(t))
    some = torch.full((BATCH,), 1 / BATCH, dtype=torch.float64)
    names = [str((t * BATCH + i) % 5000) for i in range(BATCH)]
    groups = {k: [v] for k, v in KEYS.items()}
    return StepRecord(t, names, some, some, some, rows, groups, clip=1.0, norm=1.0, coverage=1.0)


def measured(path: Path, what: str, chunk_bytes: int) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["MALLOC_ARENA_MAX"] = "1"  # else each of Lance's threads keeps a heap of its own, filled by chance
    done = subprocess.run(
        [sys.executable, "-W", "error", memory_script.__file__, str(path), what, str(chunk_bytes)],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    actual: dict[str, int] = json.loads(done.stdout)
    return actual


@pytest.mark.parametrize("what", ["embed", "query"])
@pytest.mark.parametrize(("steps", "chunk"), [(1100, 4 << 20), (4400, 8 << 20)])
def test_memory_does_not_grow_with_the_run(
    what: str, steps: int, chunk: int, pair_of_runs: Callable[[int], tuple[Path, Path]]
) -> None:
    """The short run fills several chunks, so that all buffers are in use; as a whole, the long one takes 108 MB more."""
    short, long = (measured(path, what, chunk) for path in pair_of_runs(steps))
    words = f"{what}: {short['peak'] / 1e6:.0f} MB for {steps} steps, {long['peak'] / 1e6:.0f} MB for {4 * steps}"
    assert long["peak"] <= 1.1 * short["peak"], words
