"""Killed at random moments, with loader workers left behind: the run stays whole, and in the end equals an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests.recording import kill_script
from tests.support.loops import same_numbers, stored, terms_of
from tests.support.oracles import assert_same

import backstory
from backstory.store import RunStore

PATIENCE = 90.0  # seconds for anything that should take a few
SOURCE = Path(backstory.__path__[0]).parent
ROOT = Path(__file__).parents[2]
TERMS = terms_of(kill_script.net(), kill_script.STEPS)


def start(run: Path, own: Path, pause: float) -> "subprocess.Popen[bytes]":
    own.with_suffix(".log").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    with open(own.with_suffix(".err"), "ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning",
             "-W", "ignore:This DataLoader will create", kill_script.__file__,
             str(run), str(own), str(pause)],
            stdout=subprocess.DEVNULL, stderr=errors, env=environment,
        )  # fmt: skip


def wait_until_recording(process: "subprocess.Popen[bytes]", own: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not own.with_suffix(".log").exists():
        assert process.poll() is None, own.with_suffix(".err").read_text()
        assert time.monotonic() < end, "the program did not begin to record"
        time.sleep(0.02)


def kill(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Kill the program alone; returns the workers that it leaves behind."""
    try:
        orphans: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        orphans = []
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    return orphans


def end(orphans: list[psutil.Process]) -> None:
    for orphan in orphans:
        try:
            orphan.kill()
        except psutil.NoSuchProcess:
            pass


def check_whole(run: Path, own: Path) -> None:
    """Opened for writing at once: no orphan holds the lock. Every step is there with all of its rows."""
    if not (run / "config.json").exists():
        return
    store = RunStore.open(run)
    assert store.verify() == []
    table, n = store.steps(), store.n_steps()
    assert table.step.tolist() == list(range(n))
    assert table.rows.tolist() == [kill_script.BATCH] * n
    block = store.read(0, store.n_rows(), samples=True)
    assert block.samples is not None
    expected = [str(i) for batch in kill_script.batches(0)[:n] for i in batch]
    assert block.samples == expected
    with RunStore.open(run, write=True) as writer:
        assert writer.verify() == []
    saved = int(torch.load(own)["step"]) if own.exists() else 0
    assert saved <= (n or len(store.spool.steps())), "the run lags behind the program's own checkpoint"


@pytest.mark.parametrize(
    ("kills", "seed"), [(1, 1), pytest.param(20, 2, marks=pytest.mark.slow)], ids=["1 kill", "20 kills"]
)
def test_a_run_survives_kills(kills: int, seed: int, tmp_path: Path) -> None:
    run, own = tmp_path / "run", tmp_path / "own.pt"
    luck, left_behind = random.Random(seed), 0
    for i in range(kills):
        process = start(run, own, pause=0.02 if kills < 10 else 0.08)
        try:
            wait_until_recording(process, own)
            time.sleep(luck.uniform(0.0, 0.5))
        finally:
            orphans = kill(process)
        try:
            left_behind += sum(o.is_running() for o in orphans)
            assert process.returncode in (0, -signal.SIGKILL), own.with_suffix(".err").read_text()
            check_whole(run, own)
        finally:
            end(orphans)
        assert process.returncode != 0 or i > 0, "the program ended before it could be killed once"
    assert left_behind > 0, "no worker was ever left behind, so nothing was learned about the lock"
    last = start(run, own, pause=0.0)
    assert last.wait(PATIENCE) == 0, own.with_suffix(".err").read_text()
    kill_script.main(tmp_path / "undisturbed", tmp_path / "other.pt", 0.0, workers=0)
    same_numbers(stored(run), stored(tmp_path / "undisturbed"), TERMS)
    one, two = (RunStore.open(p).load_tensors("basis") for p in (run, tmp_path / "undisturbed"))
    for name in two:
        assert_same(one[name], two[name], TERMS)
    assert backstory.open(run).config["fingerprints"][str(kill_script.STEPS)]
    assert np.isfinite(stored(run).rows.numpy()).all()
