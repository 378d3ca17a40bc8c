"""`backstory exact`: exact influence by replaying the run's recipe, stored in the run."""

from typing import Annotated

import typer

from . import output, recipes
from .options import At, Json, Notes, Per, Plot, RecipeName, RunPath, Top, TrustRecipe
from .query import Request

PRECISIONS = ("float32", "float64")


def parse_queries(text: str) -> list[str]:
    """`NAME`, or `NAME:I,J,…` as one selection for each index."""
    name, colon, indices = text.rpartition(":")
    return [f"{name}:{i.strip()}" for i in indices.split(",")] if colon and "," in indices else [text]


def exact(
    run: RunPath,
    queries: Annotated[
        str, typer.Option(metavar="NAME[:INDEX,…]", help="Query set (its mean loss), or some of its queries by index.")
    ],
    each: Annotated[bool, typer.Option("--each", help="Every query of the set by itself, instead of the mean.")] = False,
    at: At = "final",
    since: Annotated[int, typer.Option(help="Score only steps from this one on: a shorter backward sweep; the run is still replayed whole.", min=0)] = 0,
    precision: Annotated[
        str | None, typer.Option(help=f"Compute in {' or '.join(PRECISIONS)} (default: the recipe's own precision).")
    ] = None,
    top: Top = 5, per: Per = "sample", recipe: RecipeName = None, trust_recipe: TrustRecipe = False,
    plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Compute exact influence by replaying the training run.

    The recipe is trained again and differentiated through every step: a few training runs for one query, less for each further one. The result is stored
    in the run; an interrupted command continues where it stopped.
    """
    if precision not in (None, *PRECISIONS):
        raise typer.BadParameter(f"--precision must be {' or '.join(PRECISIONS)}, got {precision!r}.")
    import torch

    from ..run.run import Run

    names = parse_queries(queries)
    request = Request(run, names, at, False, "auto", recipe, trust_recipe, plot, notes, json)
    output.plotting(plot)
    name = recipes.confirm(run, recipe, trust_recipe)
    with output.one_bar("exact") as progress:
        dtype = None if precision is None else getattr(torch, precision)
        result = Run(run).exact(names, name, at, each=each, since=since, dtype=dtype, progress=progress)

    def print_tables() -> None:
        for title, side in zip(("Helped most", "Hurt most"), result.hits(top, per=per), strict=True):
            output.hits(title, side)

    request.finish(result, print_tables, lambda: result.as_dict(top=top, per=per))
