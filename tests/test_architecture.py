"""The house stays in order: imports point down, one file knows Lance, every file has its sign."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "backstory"
FLOORS = {
    "errors": 0,
    "_version": 0,
    "workers": 0,
    "maths": 1,
    "capture": 2,
    "store": 2,
    "results": 3,
    "replay": 4,
    "exact": 5,
    "run": 6,
    "recording": 7,
    "insight": 8,
    "baselines": 8,
    "demo": 9,
    "web": 10,
    "integrations": 10,
    "cli": 11,
}
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that a file imports."""
    package = ("backstory", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = f"{base}.{node.module}" if base and node.module else base or str(node.module)
            yield from (f"{module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    here = room_of(path)
    if here == "__init__":
        return
    for name in imports(path):
        if not name.startswith("backstory.") or name == "backstory.__version__":
            continue
        there = name.split(".")[1]
        assert there in FLOORS, f"{path.name} imports {name}, which is in no known room"
        allowed = there == here or FLOORS[there] < FLOORS[here]
        assert allowed, f"{here} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]}): imports point down only"


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(p) for p in FILES} - {"__init__"}
    assert rooms <= set(FLOORS), f"rooms without a floor: {rooms - set(FLOORS)}"


def test_one_file_knows_lance() -> None:
    actual = {str(p.relative_to(SOURCE)) for p in FILES if any(n.split(".")[0] == "lance" for n in imports(p))}
    assert actual == {"store/tables.py"}


def test_nothing_is_pickled() -> None:
    banned = ("pickle", "torch.load", "torch.save", "joblib", "dill", "cloudpickle")
    for path in FILES:
        names = set(imports(path))
        assert not names & set(banned), f"{path.name} imports {names & set(banned)}"
        text = path.read_text()
        used = [name for name in ("torch.load(", "torch.save(") if name in text]
        assert not used, f"{path.name} uses torch's pickle format: {used}"


def test_only_the_command_line_prints() -> None:
    for path in FILES:
        if room_of(path) == "cli":
            continue
        calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
        printed = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not printed, f"{path.name}:{printed[0].lineno} prints"


def test_the_page_draws_and_words_nothing_by_itself() -> None:
    """Figures come from results, and what a sign means from `results/sign.py`: `web` has the type of a figure only."""
    for path in FILES:
        if room_of(path) == "web":
            drawn = {n for n in imports(path) if n.startswith("backstory.results.figures")}
            assert drawn <= {"backstory.results.figures.Figure"}, f"{path.name} imports {drawn}"
    sentence = re.compile(r"would be (higher|lower)|would (raise|lower)|(above|below) zero", re.IGNORECASE)
    texts = [p for p in (SOURCE / "web").rglob("*") if p.suffix in (".py", ".html", ".js")]
    assert len(texts) > 30
    for path in texts:
        actual = sentence.search(path.read_text())
        assert actual is None, f"{path.name} says what a sign means: {actual[0]}"


def test_the_library_never_sets_threads() -> None:
    for path in FILES:
        if room_of(path) != "cli":
            assert "set_num_threads" not in path.read_text(), f"{path.name} sets torch's threads for the user"


def test_extras_are_not_imported_with_the_package() -> None:
    """Lance may import pandas where it finds it; Backstory adds none of its extras to that, nor what they bring."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[^\w-]", x)[0] for extra in project["optional-dependencies"].values() for x in extra}
    modules = packages_distributions().items()
    extras = {m for m, names in modules if (wanted - {"backstory"}) & {n.lower().replace("_", "-") for n in names}}
    assert {"pandas", "sklearn", "lightning", "PIL"} <= extras
    code = (
        "import sys, torch, lance; before = set(sys.modules); import backstory; "
        "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "backstory" in imported
    assert not imported & (extras | {"ray", "scipy", "pytorch_lightning"})


USAGE = (["--help"], ["query"], ["nothing"], ["query", "--help"], ["query", "run", "--queries", "test", "--at", "soon"])


@pytest.mark.parametrize("typed", [*USAGE, ["complete", "qu"]], ids=" ".join)
def test_the_command_line_starts_without_torch(typed: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['backstory', *{typed!r}]\n"
        "from backstory.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'lance', 'plotly'} & set(sys.modules)\n"
        "    print('LOADED', sorted(heavy))"
    )
    words = {"_BACKSTORY_COMPLETE": "complete_bash", "COMP_WORDS": f"backstory {typed[-1]}", "COMP_CWORD": "1"}
    env = {**os.environ, **(words if typed[0] == "complete" else {})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr
    assert typed[0] != "complete" or done.stdout.startswith("query\n")


def test_modules_have_a_docstring() -> None:
    for path in FILES:
        assert ast.get_docstring(parsed(path)), f"{path} has no docstring"
