"""The zoo's command: a few families, recorded and compared; what is refused is tried with its remedy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiments.zoo.command import cells, page
from experiments.zoo.families import SAMPLES, Family, families, squares
from torch import Tensor, nn

from experiments.zoo import study as zoo


def test_there_are_many_families() -> None:
    assert len(families()) >= 40


REFUSED = ("nn.Embedding with max_norm",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families() if name not in REFUSED])
def test_a_family_is_recorded_exactly(name: str) -> None:
    found = zoo.one(families()[name])
    assert (found["result"], found["coverage"]) == ("recorded", pytest.approx(1))
    assert found["overhead"] > 1
    assert found["largest_error"] < (1e-6 if name == "Gemma 2" else 1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_recorded_with_its_remedy(name: str) -> None:
    found = zoo.one(families()[name])
    assert (found["result"], found["remedy_works"]) == ("refused", True)


class Mixing(nn.Module):
    """That subtracts the batch's mean, around a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.matrix = nn.Linear(3, 3), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(x) @ self.matrix
        return torch.tanh(h - h.mean(0))


@pytest.mark.parametrize(("remedy", "works"), [({"layers": ["head"]}, False), ({}, False)])
def test_a_remedy_that_does_not_give_right_rows_does_not_work(remedy: dict[str, list[str]], works: bool) -> None:
    def inputs(seed: int) -> dict[str, Tensor]:
        return {"x": torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}

    found = zoo.one(Family(Mixing, inputs, squares, remedy=remedy))
    assert (found["result"], found["remedy_works"]) == ("refused", works)
    assert "mixes the samples" in found["reason"]


def test_the_table() -> None:
    row = {
        "name": "X",
        "result": "refused",
        "largest_error": None,
        "coverage": None,
        "overhead": None,
        "remedy_works": False,
        "reason": "r",
    }
    assert cells({"families": [row]}) == [("X", "refused", "–", "–", "–", "no")]
    assert "| X | refused |" in page({"families": [row]})


def test_the_pages_of_models_have_every_family() -> None:
    root = Path(__file__).parents[3]
    listed = (root / "docs" / "reference" / "models.md").read_text()
    assert not [name for name in families() if name not in listed]
    text = (root / "experiments" / "results" / "zoo.md").read_text()
    table = text.split("<!-- zoo -->")[1].split("<!-- end of zoo -->")[0].strip().splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2:]] == list(families())


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments",
        "zoo",
        "--only",
        "nn.RNN",
        "--json",
        "--markdown",
        str(tmp_path / "x.md"),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    (family,) = json.loads(out.stdout)["families"]
    assert {"name", "result", "largest_error", "coverage", "overhead", "remedy_works"} <= family.keys()
    assert "nn.RNN" in (tmp_path / "x.md").read_text()
