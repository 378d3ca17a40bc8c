"""No command runs what lies in the current folder before a recipe of it is trusted; the question shows what would run."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.hostile import Hostile, renamed
from typer.testing import CliRunner

from backstory.cli import recipes
from backstory.cli.app import app

# As the console script: Python puts the script's own folder first. The commands of a list, one after the other in one
# process, each with the path as it was at the start; after each list, what a spawned worker sees.
SCRIPT = """
import contextlib, io, json, sys, traceback

def typed(words):
    sys.path[:], sys.argv = before, ["backstory", *words]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    return {"words": words, "code": code, "said": said.getvalue(), "path": list(sys.path)}

if __name__ == "__main__":
    before = list(sys.path)
    from backstory.cli import main
    from backstory.workers import spread
    for commands in json.loads(sys.argv[1]):
        found = [typed(words) for words in commands]
        worker = dict(spread(eval, [("__import__('sys').path",)], 1))[0]
        print(json.dumps({"commands": found, "worker": worker}))
"""
NAME = "my_training:recipe"
ASKING = (
    ["query", "RUN", "--queries", "test"],
    ["timeline", "RUN", "--queries", "test", "--plot", "page.html"],
    ["evolution", "RUN", "--queries", "test"],
    ["overwriting", "RUN", "--queries", "test", "--sample", "3"],
    ["sources", "RUN", "--queries", "test"],
    ["harmful", "RUN", "--queries", "test"],
    ["report", "RUN", "-o", "report.html"],
)
REFUSED = {"compress", *(words[0] for words in ASKING)}  # without a recipe; and the run has nothing to compress


def every_command(group: Any, before: tuple[str, ...] = ()) -> list[list[str]]:
    inner = getattr(group, "commands", {}).items()
    return [[*before, "--help"], *(x for name, c in inner for x in every_command(c, (*before, name)))]


def plain(run: Path, out: Path) -> list[list[str]]:
    """Commands that need no recipe, and those that ask for one."""
    free = (
        ["inspect", "RUN", "--verify"],
        ["embed", "RUN"],
        ["compress", "RUN", str(out / f"{run.name}-compressed")],
        ["export", "RUN", "--out", str(out / run.name)],
        ["erase", "RUN", "3", "--yes"],
    )
    return [[str(run) if word == "RUN" else word for word in words] for words in (*free, *ASKING)]


def trusted(run: Path) -> list[list[str]]:
    return [[*(str(run) if word == "RUN" else word for word in words), "--trust-recipe"] for words in ASKING]


def test_no_command_runs_a_file_of_the_current_folder(hostile: Hostile, tmp_path: Path) -> None:
    script, folder = tmp_path / "backstory", str(hostile.folder)
    script.write_text(SCRIPT)
    shown = every_command(typer.main.get_command(app))
    mine, bare = (renamed(run, tmp_path / run.name, name) for run, name in zip(hostile[1:], (NAME, None), strict=True))
    untrusted = [*shown, *plain(mine, tmp_path), *plain(bare, tmp_path)]
    plans = [["plan", name, "--seconds", "0.001"] for name in ("my_training.py:recipe", NAME)]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([untrusted, [*trusted(mine), *plans]])],
        cwd=hostile.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert hostile.ran() == [], done.stderr
    before, after = (json.loads(line) for line in done.stdout.splitlines())
    assert len(before["commands"]) > 38
    for actual in before["commands"]:
        assert actual["code"] == (2 if actual["words"][0] in REFUSED and "--help" not in actual["words"] else 0), actual
        assert not {folder, ""} & set(actual["path"]), actual["words"]
    for actual in after["commands"]:
        installed = max(i for i, path in enumerate(actual["path"]) if path.endswith("site-packages"))
        assert (actual["code"], actual["path"].count(folder)) == (0, 1), actual
        assert actual["path"].index(folder) > installed, actual  # packages may append folders of their own
    assert not {folder, ""} & set(before["worker"])
    assert after["worker"][-1] == folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; Python's path and modules come back afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_training", "neighbour", "late"):
        sys.modules.pop(name, None)


def asked(run: Path, answer: str = "") -> tuple[str, BaseException | None]:
    actual = CliRunner().invoke(app, ["query", str(run), "--queries", "test"], input=answer)
    return actual.output, actual.exception


def test_the_question_shows_the_call_and_where_it_is_found(hostile: Hostile, here: Path) -> None:
    run, before = renamed(hostile.mine, here / "run", "os:system", {"command": "rm -rf ~"}), list(sys.path)
    shown, error = asked(run, "n\n")
    file = importlib.util.find_spec("os").loader_state.filename  # type: ignore[union-attr]
    call = f"the recipe os:system(command='rm -rf ~'), found in {file}"
    assert f"This run names {call}. Import and run it? [y/N]: " in shown
    assert str(error) == f"{call}, was not imported. If you trust this code, pass --trust-recipe."
    assert sys.path == before
    (here / "made_up.py").write_text("raise RuntimeError")
    assert f"made_up:f(), found in {here / 'made_up.py'}." in asked(renamed(run, here / "b", "made_up:f"))[0]
    assert "nowhere.at.all:f(), which Python cannot find." in asked(renamed(run, here / "c", "nowhere.at.all:f"))[0]
    assert sys.path == before


def test_the_question_shows_the_classes_that_a_callbacks_recipe_imports(hostile: Hostile, here: Path) -> None:
    """The function is ours, the classes are the run's: naming the function does not trust them."""
    run = renamed(hostile.mine, here / "run", "backstory.integrations.written:recipe")
    (here / "made_up.py").write_text("raise RuntimeError")
    model = {"class": "made_up:Net", "arguments": {}}
    (run / "recipe.json").write_text(
        json.dumps({"model": model, "optimizer": {"class": "nowhere.at:All", "groups": []}})
    )
    classes = f"made_up:Net (found in {here / 'made_up.py'}), nowhere.at:All (which Python cannot find)"
    shown, error = asked(run, "n\n")
    assert f"its training callback wrote, with the classes {classes}. Import and run it? [y/N]: " in shown
    assert "was not imported. If you trust this code, pass --trust-recipe." in str(error)
    named = ["query", str(run), "--queries", "test", "--recipe", "backstory.integrations.written:recipe"]
    assert "Import and run it?" in CliRunner().invoke(app, named, input="n\n").output


def test_why_a_callback_wrote_no_recipe_is_known_later(hostile: Hostile, here: Path) -> None:
    run = renamed(hostile.bare, here / "run", None)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "no_recipe": "Net is defined in a function"}))
    assert "names none (none was written, because Net is defined in a function)" in str(asked(run)[1])


def test_a_recipe_that_somebody_agrees_to_is_found_in_the_folder(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    monkeypatch.chdir(hostile.folder)
    shown, error = asked(hostile.mine, "y\n")
    assert error is None
    assert "Helped most" in shown
    assert sys.path[-1] == str(hostile.folder)
    assert hostile.ran() == []


@pytest.mark.parametrize(
    ("name", "args", "shown"),
    [
        ("a.b:f", {"x": 1, "y": ["z", None], "z": {"deep": 0.5}}, "a.b:f(x=1, y=['z', None], z={'deep': 0.5})"),
        ("a.b:f", {"x": "\x1b[2J\r\n\u202e"}, r"a.b:f(x='\x1b[2J\r\n\u202e')"),
        ("a:f(), found in /safe. \x1b[8m", {"a=1), b": 2}, r"'a:f(), found in /safe. \x1b[8m'('a=1), b'=2)"),
        ("a:f", {"x": "a" * 1000 + "end"}, f"a:f(x='{'a' * 69}…(905 more characters)…{'a' * 26}end')"),
        ("a:f", {f"x{i}": i for i in range(1011)}, "a:f(" + "".join(f"x{i}={i}, " for i in range(10)) + "… 1,001 more arguments)"),
        ("a:f", None, "a:f()"),
        ("a:f", [1], "a:f()"),
    ],
)  # fmt: skip
def test_a_call_as_it_is_shown(name: str, args: Any, shown: str) -> None:
    assert recipes.call(name, args) == shown
    assert recipes.call(name, args).isprintable()


def test_what_a_question_shows_is_bounded() -> None:
    assert len(recipes.call("a" * 10**6, {"b" * 10**6 + str(i): ["\x1b" * 10**4] for i in range(100)})) < 4000


@pytest.mark.parametrize("demo", ["digits", "texts"])
def test_recipes_of_backstory_itself_need_no_question(demo: str) -> None:
    assert recipes.shipped(f"backstory.demo.{demo}:recipe")


@pytest.mark.parametrize(
    "name",
    [
        "backstory.replay.recipe:load_recipe",  # would import whatever its arguments name
        "experiments.bench.rivals:_call",  # would run whatever its arguments say
        "backstory.demo.stages:recipe",
        "backstory.demo.stages:prepare_folder",
        "backstory.demo.digits:images",
        "backstory.demo.digits",
        "backstory.demo.nothing:recipe",
        "backstory.demo.:recipe",
        "backstory.demo..digits:recipe",
        "backstory_evil.demo.digits:recipe",
        "backstory:record",
        "",
    ],
)
def test_other_functions_are_asked_about(name: str) -> None:
    assert not recipes.shipped(name)


def test_a_recipe_of_backstory_is_imported_without_the_folder(digits_run: Path, here: Path) -> None:
    actual = CliRunner().invoke(app, ["query", str(digits_run), "--queries", "few"])
    assert actual.exception is None
    assert "Import and run" not in actual.output
    assert str(here) not in sys.path


def test_a_name_that_an_installed_package_has_too(hostile: Hostile, here: Path) -> None:
    import plotly

    (here / "plotly.py").write_text("def recipe(): ...")
    run, installed = renamed(hostile.mine, here / "run", "plotly:recipe"), Path(plotly.__file__).parent
    actual = CliRunner().invoke(app, ["query", str(run), "--queries", "test", "--trust-recipe"])
    assert "has no attribute 'recipe'" in str(actual.exception)
    assert f"Python imports 'plotly' from {installed}, which shadows {here / 'plotly.py'}. Rename" in str(
        actual.exception
    )


def test_a_folder_that_was_removed_is_looked_into_by_nobody(here: Path) -> None:
    gone, before = here / "gone", list(sys.path)
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    recipes.look_here()
    assert sys.path == before


def test_a_command_and_its_children_start_without_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(sys, "path", ["", "/a", "", "/b"])
    recipes.leave_the_folder_out()
    assert sys.path == ["/a", "/b"]
    code = [sys.executable, "-S", "-c", "import sys; print('' in sys.path)"]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout.strip() == "False"
