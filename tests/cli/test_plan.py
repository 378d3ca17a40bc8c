"""`backstory plan` as a person types it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.cli.plan import load, ranks, size
from backstory.errors import UsageError

FILE = """
import torch
from torch import nn

import backstory
from neighbour import WIDTH

def losses(model, batch):
    return model(batch).square().sum(1)

def recipe():
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(WIDTH, 3)
    batches = [(list(range(4 * t, 4 * t + 4)), x[4 * t : 4 * t + 4]) for t in range(10)]
    return backstory.Recipe(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=losses, batches=batches
    )

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    path = tmp_path / "my_training.py"
    path.write_text(FILE)
    yield path
    for name in ("neighbour", "my_training"):
        sys.modules.pop(name, None)


def call(*args: str | Path) -> str:
    actual = CliRunner().invoke(app, ["plan", *map(str, args), "--seconds", "0.01"], catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    return actual.stdout


def test_a_plan_of_a_file(file: Path) -> None:
    out = call(f"{file}:recipe", "--steps", "500", "--rank", "2", "--max-bytes", "1MB", "--folder", file.parent)
    assert out.startswith("500 steps of 4 samples, 2,000 occurrences; learned projection, rank 2, int8")
    assert "fits into 1 MB; the largest rank that fits is" in out
    assert not list(file.parent.glob("backstory-plan-*"))


def test_the_json_is_the_librarys_plan(file: Path) -> None:
    out: dict[str, Any] = json.loads(call(f"{file}:recipe", "--rank", "2x3", "--projection", "random", "--json"))
    expected = backstory.plan(load(f"{file}:recipe"), rank=(2, 3), projection="random", seconds=0.01).as_dict()
    assert out.keys() == expected.keys()
    same = ("steps", "rank", "dims", "occurrences", "propagator_bytes", "curvature", "left_out", "max_bytes")
    assert [out[k] for k in same] == [list(v) if isinstance(v, tuple) else v for v in (expected[k] for k in same)]
    assert out["store_bytes"] == pytest.approx(expected["store_bytes"], rel=0.1)


def test_the_help_says_that_code_is_run() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    assert "Runs your file" in shown
    assert "The code is run." in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.py:recipe", "there is no file 'nowhere.py'"),
        ("recipe", "Write FILE.py:function"),
        ("my_training.py:", "Write FILE.py:function"),
        ("my_training.py:missing", "has no function 'missing'"),
        ("my_training.py:NUMBER", "has no function 'NUMBER'"),
    ],
)
def test_a_function_that_is_not_there(name: str, said: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    with pytest.raises(UsageError, match=said):
        load(name)


def test_an_import_path_works_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert isinstance(load("my_training:recipe")(), backstory.Recipe)
    assert sys.path[-1] == str(file.parent)


def test_the_files_neighbours_come_after_what_is_installed(file: Path) -> None:
    import plotly

    (file.parent / "plotly.py").write_text("WIDTH = 5\n")
    file.write_text(FILE.replace("from neighbour", "from plotly"))
    said = rf"cannot import name 'WIDTH' from 'plotly'.*imports 'plotly' from {Path(plotly.__file__).parent}, which shadows {file.parent}"
    with pytest.raises(UsageError, match=said):
        load(f"{file}:recipe")
    assert sys.path[-1] == str(file.parent)
    file.write_text("from neighbour import NOTHING\n")
    with pytest.raises(ImportError, match="NOTHING"):
        load(f"{file}:recipe")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20GB", 20 * 10**9), ("1.5 tb", 1.5e12), ("512MiB", 512 << 20), ("3000", 3000), ("7b", 7), ("2k", 2000)],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert size(text) == expected


def test_sizes_and_ranks_that_mean_nothing() -> None:
    for text in ("much", "20 XB", "-3GB", "", "5i"):
        with pytest.raises(UsageError, match="number of bytes, with or without a unit"):
            size(text)
    for text in ("x", "3x4x5", "-1", "1.5", ""):
        with pytest.raises(UsageError, match="rank must be a number"):
            ranks(text)
    assert (ranks("16"), ranks("32x8")) == (16, (32, 8))
    assert ranks("auto:0.95/8") == "auto:0.95/8", "`record` says what it stands for, or refuses it"
