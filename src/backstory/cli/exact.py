"""`backstory exact`: exact influence by replaying the run's recipe, stored in the run."""

from typing import Annotated

import typer

from . import output, recipes
from .leave_out import BY, AtOrAll, finish
from .options import Json, Notes, Per, Plot, RecipeName, RunPath, Top, TrustRecipe, Workers
from .query import Request

PRECISIONS = ("float32", "float64")


def parse_queries(text: str) -> list[str]:
    """`NAME`, or `NAME:I,J,…` as one selection for each index."""
    name, colon, indices = text.rpartition(":")
    return [f"{name}:{i.strip()}" for i in indices.split(",")] if colon and "," in indices else [text]


def exact(
    run: RunPath,
    queries: Annotated[
        str | None, typer.Option(metavar="NAME[:INDEX,…]", help="Query set (its mean loss), or some of its queries by index.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="source,parts:8", help="Totals of groups for any query, instead of each use for one. " + BY)
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Every query of the set by itself, instead of the mean.")] = False,
    at: AtOrAll = "final",
    since: Annotated[int, typer.Option(help="Score only steps from this one on: a shorter backward sweep; the run is still replayed whole.", min=0)] = 0,
    precision: Annotated[
        str | None, typer.Option(help=f"Compute in {' or '.join(PRECISIONS)} (default: the recipe's own precision).")
    ] = None,
    top: Top = 5, per: Per = "sample", workers: Workers = 1, recipe: RecipeName = None, trust_recipe: TrustRecipe = False,
    plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Compute exact influence by replaying the training run.

    The recipe is trained again and differentiated through every step: a few training runs for one query, less for each further one. The result is stored
    in the run; an interrupted command continues where it stopped. With --groups, the derivative of the weights is carried forward for each group
    instead: its effect on any query, which may be named later, and groups add up.
    """
    if queries is None and groups is None:
        raise typer.BadParameter("name the queries (--queries NAME), or groups of samples (--groups source,parts:8).")
    if precision not in (None, *PRECISIONS):
        raise typer.BadParameter(f"--precision must be {' or '.join(PRECISIONS)}, got {precision!r}.")
    import torch

    from ..run.run import Run
    from ..workers import keep_freed_memory

    keep_freed_memory()
    dtype = None if precision is None else getattr(torch, precision)
    if groups is not None:
        output.plotting(plot)
        name = recipes.confirm(run, recipe, trust_recipe)
        with output.one_bar("tangents") as progress:
            changes = Run(run).tangents(groups, name, workers=workers, dtype=dtype, progress=progress)
        finish(run, changes, name, queries, at, plot, notes, json)
        return
    if at == "all":
        raise typer.BadParameter("--at all is for --groups. Pass final, or the step of a checkpoint.")
    names = parse_queries(str(queries))
    request = Request(run, names, at, False, "auto", recipe, trust_recipe, plot, notes, json)
    output.plotting(plot)
    name = recipes.confirm(run, recipe, trust_recipe)
    with output.one_bar("exact") as progress:
        result = Run(run).exact(
            names, name, at, each=each, since=since, dtype=dtype, workers=workers, progress=progress
        )

    def print_tables() -> None:
        for title, side in zip(("Helped most", "Hurt most"), result.hits(top, per=per), strict=True):
            output.hits(title, side)

    request.finish(result, print_tables, lambda: result.as_dict(top=top, per=per))
