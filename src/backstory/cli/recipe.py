"""`backstory recipe`: whether a recipe will do for exact results."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from . import output
from .options import Json
from .plan import load

recipe = typer.Typer(help="Check recipes.", no_args_is_help=True, rich_markup_mode=None)


@recipe.callback()
def root() -> None:
    """Check recipes: functions that rebuild a training run."""


@recipe.command()
def check(
    recipe: Annotated[
        str,
        typer.Argument(
            help="FILE.py:function or package.module:function, which returns a backstory.Recipe. The code is run.",
            show_default=False,
        ),
    ],
    run: Annotated[Path | None, typer.Option(help="A recorded run: compare the first steps with it.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to try.", min=1)] = 4,
    json: Json = False,
) -> None:
    """Check whether a recipe will do for exact results.

    Builds it a few times and trains its first steps: about a minute. Lists what passed, and for what failed what to do. Exit code 2: something failed.
    """
    from ..replay.check import check_recipe
    from ..replay.recipe import load_recipe, stored_args
    from ..run.run import Run

    build = load(recipe)
    args = None if run is None else stored_args(Run(run), recipe)
    result = check_recipe(
        partial(load_recipe, recipe, args) if args else build, run=None if run is None else Run(run), steps=steps
    )
    if json:
        output.emit(result.as_dict())
    else:
        for line in result.lines:
            output.sentence(str(line))
    if not result:
        raise typer.Exit(2)
