"""`backstory leave-out`: train again without groups of samples; and how effects of groups are printed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from . import output, recipes
from .options import Json, Notes, Plot, RecipeName, RunPath, TrustRecipe, Workers, parse_ids, parse_step

if TYPE_CHECKING:
    from ..results.effects import GroupEffects
    from ..run.changes import WeightChanges
    from ..run.groups import By

BY = "Groups: source, label, epoch, parts:K (of the run), thirds, steps; several with commas."
NAMED = "named"


def parse_at(text: str) -> int | str:
    """`final`, `all`, or a step."""
    return text if text == "all" else parse_step(text)


AtOrAll = Annotated[
    Any,
    typer.Option(parser=parse_at, metavar="final|all|STEP", help="Model: final, all checkpoints, or one of them."),
]


def parse_groups(run: Path, by: str, ids: str | None) -> "By":
    """The groups that are meant: `--by`, or the samples of `--ids`: with commas, or a file with one on each line."""
    if ids is None and by == "ids":
        raise UsageError("--by ids needs --ids: comma-separated sample IDs, or a file with one on each line.")
    if ids is None:
        return by
    file = Path(ids)
    found = file.read_text(encoding="utf-8").split("\n") if file.is_file() else ids.split(",")
    return {file.stem if file.is_file() else NAMED: parse_ids(run, [x.strip() for x in found if x.strip()])}


def leave_out(
    run: RunPath,
    by: Annotated[str, typer.Option(metavar="source|label|epoch|ids|…", help=BY)] = "source",
    ids: Annotated[str | None, typer.Option(help="Comma-separated sample IDs, or a file with one ID per line: one group.")] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="NAME[:INDEX,…]", help="Query set (its mean loss), or some of its queries by index.")
    ] = None,
    at: AtOrAll = "final",
    others: Annotated[str, typer.Option(help="Weights of the other samples: keep, or renormalise.")] = "keep",
    empty: Annotated[str, typer.Option(help="Steps left without samples: coast (gradient 0), or skip.")] = "coast",
    twins: Annotated[int, typer.Option(help="Trainings that measure what rounding does.", min=0)] = 3,
    workers: Workers = 1,
    recipe: RecipeName = None, trust_recipe: TrustRecipe = False,
    plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Train again without each group of samples.

    At most one training run per group, and the ground truth. The weights are stored in the run, so that a later query costs two forward passes per
    group; an interrupted command continues where it stopped.
    """
    from ..run.run import Run
    from ..workers import keep_freed_memory

    keep_freed_memory()
    output.plotting(plot)
    groups = parse_groups(run, by, ids)
    name = recipes.confirm(run, recipe, trust_recipe)
    with output.one_bar("leave out") as progress:
        changes = Run(run).leave_out(
            groups, name, others=others, empty=empty, twins=twins, workers=workers, progress=progress
        )
    finish(run, changes, name, queries, at, plot, notes, json)


def finish(
    run: Path, changes: "WeightChanges", recipe: str, queries: str | None, at: int | str, plot: Path | None, notes: bool, json: bool
) -> None:  # fmt: skip
    """Print what the groups do to the queries, or without queries what is stored."""
    if queries is None:
        print_stored(changes, json)
        return
    from ..run.queries import open_queries
    from .exact import parse_queries
    from .query import Request

    names = parse_queries(queries)
    result = open_queries(run, names, recipe, "final" if at == "all" else at).effects(changes, at)
    request = Request(run, names, at, False, "auto", recipe, True, plot, notes, json)
    request.finish(result, lambda: print_effects(result))


def print_stored(changes: "WeightChanges", json: bool) -> None:
    """The groups whose changes of the weights the run has."""
    if json:
        output.emit(changes.as_dict())
        return
    rows = [(p.name, f"{p.samples:,}", f"{p.occurrences:,}", f"{p.first:,}") for p in changes.parts]
    output.table("", ("group", "samples", "uses", "first step"), rows)
    steps = ", ".join(f"{step:,}" for step in changes.spec.steps)
    output.sentence(f"\nStored in the run, at steps {steps}. To see what they do to queries: --queries NAME.")


def print_effects(result: "GroupEffects") -> None:
    """The effect of each group; over combinations of two, over queries and over checkpoints as tables of their own."""
    last, sure = result.mean[:, -1].tolist(), result.mean_clear[:, -1].tolist()
    rows = [
        (name, f"{n:,}", f"{uses:,}", f"{first:,}", mark(x, ok))
        for name, n, uses, first, x, ok in zip(
            result.groups, result.samples, result.occurrences, result.first_steps, last, sure, strict=True
        )
    ]
    grid = result.grid
    if grid is None:
        output.table("", ("group", "samples", "uses", "first step", "effect"), rows)
    else:
        _wide("", ", ".join(result.by), grid[0], grid[1], _cells(grid[2], grid[3]))
    if len(result.queries) > 1:
        cells = _cells(result.values[:, -1].tolist(), result.clear[:, -1].tolist())
        _wide("Effect on each query", "group", result.groups, result.queries, cells)
    if len(result.checkpoints) > 1:
        steps = [f"step {c:,}" for c in result.checkpoints]
        cells = _cells(result.mean.tolist(), result.mean_clear.tolist())
        _wide("Effect at each checkpoint", "group", result.groups, steps, cells)


def mark(x: float, sure: bool) -> str:
    """An effect; in brackets where it is below rounding, a dash where there is none."""
    return "–" if x == 0 else output.number(x) if sure else f"({output.number(x)})"


def _cells(values: list[list[float]], sure: list[list[bool]]) -> list[list[str]]:
    return [[mark(x, ok) for x, ok in zip(*pair, strict=True)] for pair in zip(values, sure, strict=True)]


def _wide(title: str, corner: str, down: Any, across: Any, cells: list[list[str]]) -> None:
    """A table, as many of its columns side by side as fit."""
    size = output.columns_that_fit(list(across), (corner, *down), cells)
    for lo in range(0, len(across), size):
        part = [(name, *row[lo : lo + size]) for name, row in zip(down, cells, strict=True)]
        output.table(title, (corner, *across[lo : lo + size]), part)
