"""The examples at small size: each runs from start to end, and prints what it promises."""

import re
import runpy
from pathlib import Path

import pytest

import backstory
from backstory.demo import digits
from backstory.demo.data import DataError

EXAMPLES = Path(__file__).parents[1] / "examples"


def no_network() -> None:
    raise DataError("there is no network in a test")


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(digits, "mnist_5k", no_network)
    monkeypatch.setattr("sys.argv", [name, "--small", "--out", str(folder / "run")])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert backstory.open(folder / "run").config["closed"]
    return capsys.readouterr().out


def test_mnist_finds_wrong_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run("mnist", tmp_path, monkeypatch, capsys)
    top, hits, chance = map(int, re.findall(r"Of the (\d+) .* (\d+) have .* about (\d+)", printed)[0])
    assert 5 * chance < hits <= top
    assert "WRONG LABEL" in printed


def test_finetune_gpt_names_the_passages_that_taught_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run("finetune_gpt", tmp_path, monkeypatch, capsys)
    before, after = map(float, re.findall(r"(?:fine-tuning|after): ([\d.]+)", printed))
    assert after < before
    assert len(re.findall(r"^  \+0\.\d+ at step +\d+, manual/", printed, flags=re.M)) == 5


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_trainer_values_its_two_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run("trainer", tmp_path, monkeypatch, capsys)
    values = {
        (s, d): float(v) for s, d, v in re.findall(r"^(\w+) +for unseen (\w+) *: ([+-][\d.]+)", printed, flags=re.M)
    }
    assert len(values) == 4
    assert values["code", "code"] > max(0, values["prose", "code"]), "code helps with code"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_an_example_is_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 80
