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
from . import recipes, show
from .options import Json

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            help="FILE.py:function or package.module:function, which gives a backstory.Recipe. The code is run.",
            show_default=False,
        ),
    ],
    steps: Annotated[int | None, typer.Option(help="Planned steps; without it, the recipe's own.", min=1)] = None,
    projection: Annotated[str, typer.Option(help="learned, random, mask or full.")] = "learned",
    rank: Annotated[str, typer.Option(help="A number, OUTxIN, or auto:SHARE, such as auto:0.95.")] = "16",
    curvature: Annotated[str, typer.Option(help="auto, empirical, empirical/K, sampled:D or exact:N.")] = "auto",
    encoding: Annotated[str, typer.Option(help="float16, int8, float32 or float64.")] = "float16",
    checkpoints: Annotated[int | None, typer.Option(help="Checkpoints between start and end.", min=0)] = None,
    uncovered: Annotated[str, typer.Option(help="error or skip: layers that no rule covers.")] = "error",
    outputs: Annotated[str, typer.Option(help="Kind of the model's outputs, for sampled and exact.")] = "cross-entropy",
    max_bytes: Annotated[str | None, typer.Option(help="Disk that the run may take, such as 20GB.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the trial is written and removed.")] = None,
    seconds: Annotated[float, typer.Option(help="About how long each turn of steps lasts.", min=0.001)] = 1.0,
    json: Json = False,
) -> None:
    """What recording will cost, tried on your own model.

    Runs your own file, and a few steps of its training, plain and recorded, on copies of its model and optimizer: bytes
    on disk, memory to embed and to ask, slow-down, and what other settings would cost.
    """
    from ..recording.plan import plan as make_plan

    make = load(recipe)
    chosen: dict[str, Any] = {"projection": projection, "curvature": curvature, "encoding": encoding}
    with show.progress() as say:
        found = make_plan(
            make, steps=steps, checkpoints=checkpoints, max_bytes=None if max_bytes is None else size(max_bytes),
            uncovered=uncovered, outputs=outputs, folder=folder, seconds=seconds, progress=say, rank=ranks(rank), **chosen,
        )  # fmt: skip
    if json:
        show.emit(found.as_dict())
    else:
        show.out.print(str(found), soft_wrap=True, highlight=False, markup=False)


def load(name: str) -> Callable[[], Any]:
    """The function that `FILE.py:function` or `package.module:function` names; a file is run."""
    where, _, function = name.rpartition(":")
    if not where or not function.isidentifier():
        raise UsageError(f"found {name!r}; expected FILE.py:function or package.module:function.")
    if not where.endswith(".py"):
        from ..replay.recipe import load_recipe

        recipes.look_here()  # to name it is to trust it
        return lambda: load_recipe(name)
    make: Callable[[], Any] | None = getattr(_run_file(Path(where)), function, None)
    if not callable(make):
        raise UsageError(f"{where} has no function {function!r}. Name one that returns a backstory.Recipe.")
    return make


def _run_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"there is no file {str(file)!r}; expected the Python file that holds the recipe's function.")
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
        raise UsageError(f"found --max-bytes {text!r}; expected a number of bytes, or one with a unit, such as 20GB.")
    return int(float(fits[1]) * UNITS[unit])


def ranks(text: str) -> int | tuple[int, int] | str:
    """`16`, `32x16` for (out, in), or `auto:0.95` as it is."""
    if text.startswith("auto:"):
        return text
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"found --rank {text!r}; expected a number such as 16, OUTxIN such as 32x16, or auto:0.95.")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
