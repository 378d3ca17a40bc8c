"""Documentation that is executed or compared, so that it stays true. The site has its own: test_site.py."""

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import backstory
from backstory.capture.optimizers import OPTIMIZERS
from backstory.cli.options import Encoding
from backstory.maths.encoding import DTYPES
from backstory.maths.layers import RULES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "backstory"


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(), flags=re.M | re.S)


def test_readme_example_gives_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks(ROOT / "README.md", "python"):
        exec(compile(block, "README.md", "exec"), scope)
    actual, expected = capsys.readouterr().out, "".join(blocks(ROOT / "README.md", "text"))
    assert re.sub(r"[-+]?\d+\.\d+", "#", actual) == re.sub(r"[-+]?\d+\.\d+", "#", expected), actual
    numbers = [[float(x) for x in re.findall(r"[-+]?\d+\.\d+", text)] for text in (actual, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05), actual


def test_the_lines_of_format_md_read_a_run(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    for encoding in DTYPES:
        path = tmp_path / encoding
        with backstory.record(
            model, optimizer, path, loss_reduction="mean", projection="random", rank=2, encoding=encoding
        ) as rec:
            for _ in range(3):
                with rec.step(range(6)):
                    model(x).square().mean(1).mean().backward()
                    optimizer.step()
                optimizer.zero_grad()
        scope: dict[str, object] = {"run": str(path)}
        exec(compile(blocks(ROOT / "docs" / "reference" / "format.md", "python")[0], "format.md", "exec"), scope)
        run = backstory.open(path)
        expected = run._store.read(0, run.n_occurrences, dtype=torch.float64).rows
        assert expected is not None
        np.testing.assert_allclose(np.asarray(scope["rows"]), expected.numpy(), rtol=1e-6, atol=0)
        assert np.abs(expected.numpy()).max() > 0


def test_layers_optimizers_and_encodings_are_those_of_their_tables() -> None:
    docs = ROOT / "docs" / "reference"
    models, rows = (docs / "models.md").read_text(), (docs / "format.md").read_text()
    settings, (_, option) = (docs / "api" / "recording.md").read_text(), get_args(Encoding)
    torchs = [kind.__name__.lstrip("_") for kind in (*RULES, *OPTIMIZERS) if kind.__module__.startswith("torch.")]
    for name in torchs:
        assert re.search(rf"`(torch\.optim\.)?{name}`", models), f"{name} is not in models.md"
    for name in DTYPES:
        assert f"`{name}`" in rows, f"{name} is not in format.md"
        assert f'`"{name}"`' in settings, f"{name} is not in recording.md"
        assert re.search(rf"\b{name}\b", option.help), f"{name} is not in the help of --encoding"


def test_contributing_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room in sorted(x.name for x in SOURCE.iterdir() if (x / "__init__.py").exists()):
        assert f"  {room} " in text, f"the room {room} is not in CONTRIBUTING.md"


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in sorted(set(re.findall(r"[\w-]+/[\w/-]*\w\.(?:py|md|html|toml)", text))):
        files = (ROOT / name, SOURCE / name)
        assert "NAME" in name or any(file.exists() for file in files), (
            f"CONTRIBUTING.md names {name}, which is not there"
        )
