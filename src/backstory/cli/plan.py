"""`backstory plan`: what a recording will cost, from a short trial of the user's own training."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import output, recipes
from .options import Json

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            help="FILE.py:function or package.module:function, which returns a backstory.Recipe. The code is run.",
            show_default=False,
        ),
    ],
    steps: Annotated[int | None, typer.Option(help="Planned steps; if not given, the recipe's.", min=1)] = None,
    preset: Annotated[
        str | None, typer.Option(help="fast, default or best: how much recording may cost.", show_default=False)
    ] = None,
    projection: Annotated[
        str | None, typer.Option(help="learned, random, mask or full; the preset's if not given.")
    ] = None,
    rank: Annotated[
        str | None, typer.Option(help="A number, OUTxIN, or auto:SHARE, such as auto:0.95; the preset's if not given.")
    ] = None,
    curvature: Annotated[
        str | None,
        typer.Option(
            help="auto, ggn, ggn:K (K passes in some steps), empirical, sampled:D (D draws), exact:N (N outputs); /K adds K position groups."
        ),
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="auto, float16, int8, float32 or float64.")] = None,
    checkpoints: Annotated[int | None, typer.Option(help="Checkpoints between start and end.", min=0)] = None,
    uncovered: Annotated[
        str, typer.Option(help="What to do with parameters that no rule covers: general, skip or error.")
    ] = "general",
    outputs: Annotated[
        str, typer.Option(help="Kind of the model's outputs, for sampled and exact curvature.")
    ] = "cross-entropy",
    max_bytes: Annotated[str | None, typer.Option(help="Disk that the run may take, such as 20GB.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Directory for temporary trial files.")] = None,
    seconds: Annotated[float, typer.Option(help="Approximate time per round of steps, in seconds.", min=0.001)] = 1.0,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Try the three presets too, and show what each costs.")
    ] = True,
    json: Json = False,
) -> None:
    """Estimate what recording will cost, by a trial on your own model.

    Runs your file and a few steps of its training, with and without recording, on copies of its model and optimizer. Reports
    disk space, memory to embed and query, slowdown, and with --max-bytes the largest rank that fits.
    """
    from ..recording.plan import plan as plan_recording

    function = load(recipe)
    given = {"projection": projection, "curvature": curvature, "encoding": encoding}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    chosen |= {} if rank is None else {"rank": ranks(rank)}
    with output.progress() as progress:
        result = plan_recording(
            function, steps=steps, checkpoints=checkpoints, max_bytes=None if max_bytes is None else size(max_bytes),
            uncovered=uncovered, outputs=outputs, folder=folder, seconds=seconds, progress=progress, preset=preset, compare=compare,
            **chosen,
        )  # fmt: skip
    if json:
        output.emit(result.as_dict())
    else:
        output.line(str(result))


def load(name: str) -> Callable[[], Any]:
    """The function that `FILE.py:function` or `package.module:function` names; a file is run."""
    where, _, function = name.rpartition(":")
    if not where or not function.isidentifier():
        raise UsageError(f"{name!r} does not name a recipe. Write FILE.py:function or package.module:function.")
    if not where.endswith(".py"):
        from ..replay.recipe import load_recipe

        recipes.look_here()  # to name it is to trust it
        return lambda: load_recipe(name)
    recipe: Callable[[], Any] | None = getattr(_run_file(Path(where)), function, None)
    if not callable(recipe):
        raise UsageError(f"{where} has no function {function!r}. Name one that returns a backstory.Recipe.")
    return recipe


def _run_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"there is no file {str(file)!r}. Name the Python file that defines the recipe's function.")
    recipes.look_in(file.resolve().parent)  # its neighbours; what is installed comes first
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        from ..replay.recipe import hidden

        if not (remedy := hidden(error.name or file.stem)):
            raise
        raise UsageError(f"{file} cannot be imported ({error}). {remedy}") from error
    return module


def size(text: str) -> int:
    """`20GB`, `1.5 TB`, `512MiB` or a number, in bytes."""
    fits = SIZE.fullmatch(text.strip())
    unit = fits[2].lower() if fits else "?"
    if fits is None or unit not in UNITS:
        raise UsageError(f"--max-bytes must be a number of bytes, with or without a unit (20GB, 512MiB), got {text!r}.")
    return int(float(fits[1]) * UNITS[unit])


def ranks(text: str) -> int | tuple[int, int] | str:
    """`16`, `32x16` for (out, in), or `auto:0.95` as it is."""
    if text.startswith("auto:"):
        return text
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"--rank must be a number (16), OUTxIN (32x16) or auto:SHARE (auto:0.95), got {text!r}.")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
