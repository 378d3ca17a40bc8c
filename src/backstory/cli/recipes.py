"""Which recipe a command imports, and where Python looks for it: nowhere in the current folder before somebody trusts one.

Then that folder is the last place to look, until the process ends: installed packages come before files of the same name.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from ..errors import UsageError

HEAD, TAIL, MOST = 70, 30, 10  # letters of a value at either end, and arguments of a call, that a question shows
DEMOS = f"{__name__.partition('.')[0]}.demo."


def leave_the_folder_out() -> None:
    """Take the current folder off Python's path, as `python -c` puts it there; also for processes that are started from here."""
    sys.path[:] = [entry for entry in sys.path if entry]
    os.environ["PYTHONSAFEPATH"] = "1"


def look_in(folder: str | Path) -> None:
    """From now on Python looks for modules in this folder too, after all other places."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def look_here() -> None:
    """As `look_in`, for the folder that is the current one now."""
    with suppress(FileNotFoundError):  # it was removed
        look_in(Path.cwd())


def confirm(run: Path, recipe: str | None, trusted: bool) -> str:
    """The recipe to import: the one the user passed, or the run's own once the user agrees."""
    config = _config(run)
    name = config.get("recipe") if recipe is None else recipe
    if name is None:
        why = f" (none was written, because {config['no_recipe']})" if config.get("no_recipe") else ""
        raise UsageError(
            f"this command needs a recipe, a function that gives model, loss and data, and the run names none{why}. "
            "Pass --recipe package.module:function."
        )
    if shipped(str(name)):
        return str(name)
    foreign = recipe is None or written(recipe)  # what the run names, not what the user did
    if foreign and not trusted and not _agreed(f"This run names {described(run)}. Import and run it?"):
        raise UsageError(f"{described(run)}, was not imported. If you trust this code, pass --trust-recipe.")
    look_here()
    return str(name)


def shipped_recipe(run: Path) -> str | None:
    """The recipe that the run names, if it is Backstory's own and may be imported without a prompt; else None."""
    name = str(_config(run).get("recipe"))
    return name if shipped(name) else None


def shipped(name: str) -> bool:
    """Whether a recipe is Backstory's own: what a module of its demos declares as RECIPE.

    Any other function of the package is as foreign as the arguments that the run gives it: `load_recipe` imports anything.
    """
    module = name.partition(":")[0]
    if not module.startswith(DEMOS):
        return False
    try:
        return getattr(importlib.import_module(module), "RECIPE", None) == name
    except ImportError:
        return False


def written(name: str) -> bool:
    """Whether a recipe is the one that reads what a trainer's callback wrote: it imports the classes that the run names."""
    from ..replay.recipe import WRITTEN

    return name == WRITTEN


def described(run: Path) -> str:
    """The recipe that a run names, as the call that it is, and where Python would find it: in one line."""
    config = _config(run)
    name = str(config.get("recipe"))
    if written(name):
        return _written(run)
    return f"the recipe {call(name, config.get('recipe_args'))}, {_where(name)}"


def _written(run: Path) -> str:
    """What the callback's recipe would import, class by class."""
    from ..integrations.written import class_paths
    from ..store import RunStore

    paths = class_paths(RunStore.open(run).recipe() or {})
    classes = ", ".join(f"{_short(_name(path))} ({_where(path)})" for path in paths[:MOST])
    return f"the recipe that its training callback wrote, with the classes {classes}"


def _where(name: str) -> str:
    """Where Python would find a module."""
    from ..replay.recipe import place

    before = list(sys.path)
    look_here()
    try:
        path = place(name.partition(":")[0])
    finally:
        sys.path[:] = before
    return "which Python cannot find" if path is None else f"found in {_plain(path)}"


def call(name: str, args: Any) -> str:
    """`package.module:function(argument=value, …)`, of bounded length and without anything that a terminal acts on."""
    given = list(args.items()) if isinstance(args, Mapping) else []
    parts = [f"{_short(_name(key))}={_short(repr(value))}" for key, value in given[:MOST]]
    if len(given) > MOST:
        parts.append(f"… {len(given) - MOST:,} more arguments")
    return f"{_short(_name(name))}({', '.join(parts)})"


def _config(run: Path) -> Mapping[str, Any]:
    from ..run.run import Run

    return Run(run).config


def _agreed(question: str) -> bool:
    try:
        return typer.confirm(question)
    except typer.Abort:  # nobody is there to answer
        return False


def _plain(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _name(text: str) -> str:
    """A name as it is; anything else in quotes, so that it cannot pass for the rest of the line."""
    return text if all(part.isidentifier() for part in text.replace(":", ".").split(".")) else repr(text)


def _short(text: str) -> str:
    more = len(text) - HEAD - TAIL
    return text if more <= 0 else f"{text[:HEAD]}…({more:,} more characters)…{text[-TAIL:]}"
