"""Exact work of all three ways, killed (SIGKILL) at many moments: a second call goes on, gives the same, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.replay.test_reproduction import recorded
from tests.run import kill_script
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor

import backstory
from backstory.run import pieces
from backstory.run.run import Run

SOURCE, ROOT = Path(backstory.__path__[0]).parent, Path(__file__).parents[2]
PATIENCE = 1800.0  # seconds, on a busy machine, for what takes one minute
ARGS: dict[str, Any] = {"optimizer": "momentum", "clip": 0.3, "dropout": 0.4}
WAYS = ("reverse", "tangents", "leave_out")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("killed") / "run", **ARGS)


def numbers(run: Run, way: str) -> Tensor:
    result = kill_script.compute(run, way)
    if way == "reverse":
        return result.scores  # type: ignore[no-any-return]
    recipe = examples.make(**ARGS)
    return result.effects(recipe.model, recipe.loss, recipe.queries["q"], "all").values  # type: ignore[no-any-return]


def kill(base: Run, folder: Path, moments: dict[str, list[int]]) -> list[tuple[str, Path, str]]:
    """A copy of the run for each moment, and how its process ended."""
    those = [(way, folder / f"{way}-{m}", m) for way, ms in moments.items() for m in ms]
    for _, path, _ in those:
        shutil.copytree(base.path, path)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, kill_script.__file__, *(f"{path}:{way}:{m}" for way, path, m in those)],
        env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    return [(way, path, how) for (way, path, _), how in zip(those, done.stdout.splitlines(), strict=True)]


def check_resumed(base: Run, folder: Path, killed: list[tuple[str, Path, str]]) -> None:
    undisturbed = Run(shutil.copytree(base.path, folder / "undisturbed"))
    expected = {way: numbers(undisturbed, way) for way in WAYS}
    for way, path, _ in killed:
        size = max(1.0, float(expected[way].abs().max()))
        assert_same(numbers(Run(path), way), expected[way], 9 * examples.TERMS, size=size)
        assert not (path / pieces.WORK).exists(), sorted(x.name for x in (path / pieces.WORK).iterdir())
        assert not list(path.rglob("*.tmp"))
        assert Run(path)._store.verify() == []


def test_each_way_survives_a_kill(base: Run, tmp_path: Path) -> None:
    killed = kill(base, tmp_path, {"reverse": [8], "tangents": [15], "leave_out": [11]})
    assert [how for *_, how in killed] == ["killed"] * 3
    assert any((path / pieces.WORK).exists() for _, path, _ in killed), "nothing was on its way"
    check_resumed(base, tmp_path, killed)


@pytest.mark.slow
def test_each_way_survives_kills_at_ten_moments(base: Run, tmp_path: Path) -> None:
    killed = kill(base, tmp_path, {way: [1, 2, 3, 5, 7, 10, 13, 17, 21, 26] for way in WAYS})
    for way in WAYS:
        assert sum(how == "killed" for w, _, how in killed if w == way) >= 8
    check_resumed(base, tmp_path, killed)
