"""Documentation that is executed or compared, so that it stays true. UPDATE_DOCS=1 rewrites what is generated."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "backstory"


def commands(group: Any, before: str = "") -> Iterator[str]:
    """Every command of the command line, in order."""
    yield before
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{before} {name}".strip())


COMMANDS = list(commands(typer.main.get_command(app)))


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
    for encoding in ("float16", "int8", "float64"):
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
        exec(compile(blocks(ROOT / "docs" / "format.md", "python")[0], "format.md", "exec"), scope)
        run = backstory.open(path)
        expected = run._store.read(0, run.n_occurrences, dtype=torch.float64).rows
        assert expected is not None
        np.testing.assert_allclose(np.asarray(scope["rows"]), expected.numpy(), rtol=1e-6, atol=0)
        assert np.abs(expected.numpy()).max() > 0


def cli_page() -> str:
    parts = [
        "# The command line\n\nExit code 0: success; 2: user error, explained on the error stream; 1: you declined a prompt, or "
        "`inspect --verify` detected damage. `--json` prints one JSON object, last: of a query or an insight, the result's "
        "`as_dict()`.\n\nArguments have the names that they have in Python. `--queries NAME[:INDEX]` names a query set, stored in the run "
        "or of its recipe, or one query of it; it is checked before weights are loaded.\n"
    ]
    for command in COMMANDS:
        shown = CliRunner().invoke(
            app, [*command.split(), "--help"], prog_name="backstory", env={"COLUMNS": "110", "TERMINAL_WIDTH": "110"}
        )
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        parts.append(f"## `backstory{' ' + command if command else ''}`\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def test_cli_page_is_the_help_text() -> None:
    same(ROOT / "docs" / "cli.md", cli_page())


def test_contributing_names_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room in sorted(x.name for x in SOURCE.iterdir() if (x / "__init__.py").exists()):
        assert f"  {room} " in text, f"the room {room} is not in CONTRIBUTING.md"


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in sorted(set(re.findall(r"\w+/[\w/-]*\w\.(?:py|md|html|toml)", text))):
        files = (ROOT / name, SOURCE / name)
        assert "NAME" in name or any(file.exists() for file in files), (
            f"CONTRIBUTING.md names {name}, which is not there"
        )


def test_public_names_are_few_and_documented() -> None:
    names = sorted(backstory.__all__)
    assert names == [
        "BackstoryError", "Influence", "Presentation", "Recipe", "Recorder", "Run", "Settings", "__version__", "open", "plan", "record", "register", "register_optimizer", "with_ids",
    ]  # fmt: skip
    page = (ROOT / "docs" / "api.md").read_text()
    for name in names:
        assert f"backstory.{name}" in page, f"{name} is not in docs/api.md"


def test_every_argument_of_record_is_documented() -> None:
    import inspect

    page = (ROOT / "docs" / "api.md").read_text()
    names = [*inspect.signature(backstory.record).parameters, *inspect.signature(backstory.Settings).parameters]
    for name in names:
        known = name in ("model", "optimizer", "path", "short")
        assert f"`{name}`" in page or known, f"record({name}=) is not in docs/api.md"


def test_links_between_pages_lead_somewhere() -> None:
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name} links to {link}"


def same(file: Path, expected: str) -> None:
    if os.environ.get("UPDATE_DOCS"):
        file.write_text(expected)
    assert file.exists(), f"{file.name} is missing: run the tests once with UPDATE_DOCS=1"
    assert file.read_text() == expected, f"{file.name} is out of date: run the tests once with UPDATE_DOCS=1"
