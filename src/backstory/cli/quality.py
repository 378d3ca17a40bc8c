"""`backstory calibrate` and `backstory check`: how well this run's results rank, measured by exact results and by training again."""

from typing import TYPE_CHECKING, Annotated

import typer

from . import output, recipes
from .options import At, Json, Method, Notes, Plot, RecipeName, RunPath, TrustRecipe, Workers

if TYPE_CHECKING:
    from ..results.quality import Quality

Set = Annotated[
    str, typer.Option("--queries", metavar="NAME", help="Query set: its mean loss, and some of its single queries.")
]
Name = Annotated[
    str, typer.Option("--queries", metavar="NAME[:INDEX]", help="Query set (its mean loss), or one of its queries.")
]
CHECKED = "check"  # the folder of what was retrained so far


def calibrate(
    run: RunPath,
    queries: Set,
    at: At = "final",
    singles: Annotated[int, typer.Option(help="Single queries of the set, evenly spread over it.", min=0)] = 4,
    removals: Annotated[int, typer.Option(help="Single uses that are left out, one training each (0: none).", min=0)] = 24,
    seed: Annotated[int, typer.Option(help="Seed that draws the uses that are left out.")] = 0,
    workers: Workers = 1, recipe: RecipeName = None, trust_recipe: TrustRecipe = False, json: Json = False,
) -> None:  # fmt: skip
    """Measure how well this recording ranks.

    Recorded influences are compared with exact ones, by tenths of the run, and exact ones with training again without a few uses. The
    quality is stored in the run, and every result carries it. Takes about 25 training runs; an interrupted command continues.
    """
    from ..run.run import Run
    from ..workers import keep_freed_memory

    keep_freed_memory()
    name = recipes.confirm(run, recipe, trust_recipe)
    opened = Run(run)
    with output.one_bar("calibrate") as progress:
        opened.calibrate(
            queries, name, at, singles=singles, removals=removals, seed=seed, workers=workers, progress=progress
        )
    kinds = {
        "mean": opened.quality(at, mean=True),
        "single": opened.quality(at),
        "exact": opened.quality(at, exact=True),
    }
    if json:
        output.emit({kind: quality.as_dict() for kind, quality in kinds.items()})
        return
    for quality in dict.fromkeys(kinds.values()):
        print_quality(quality)


def print_quality(quality: "Quality") -> None:
    """The sentence, and the ranks of recorded values by tenths, those of exact ones by thirds."""
    what, parts = (
        ("Exact beside retraining", quality.retrained) if quality.exact else ("Recorded beside exact", quality.tenths)
    )
    rows = [
        (f"{x.first:,} to {x.last - 1:,}", f"{x.uses:,}", _rank(x.rank), f"{_rank(x.low)} to {_rank(x.high)}")
        for x in parts
        if not quality.exact or x.rank is not None
    ]
    if rows:
        output.table(f"{what}, on {quality.on}", ("steps", "uses", "rank correlation", "95 % interval"), rows)
    output.sentence(quality.sentence)
    output.out.print()


def _rank(x: float | None) -> str:
    from ..results.quality import two_digits

    return "–" if x is None else two_digits(x)


def check(
    run: RunPath,
    queries: Name,
    samples: Annotated[int, typer.Option(help="Samples drawn at random, beside the first and the last of the result.", min=0)] = 60,
    seed: Annotated[int, typer.Option(help="Seed that draws them.")] = 0, method: Method = "auto",
    workers: Workers = 1, recipe: RecipeName = None, trust_recipe: TrustRecipe = False,
    plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Compare a result with retraining.

    The model is trained again without each of some samples, and the change of the loss is put beside the prediction. Samples are
    drawn from all parts of the run; three trainings that differ by rounding alone show how much of a change is noise. An
    interrupted command continues.
    """
    from ..exact.check import check as check_result
    from ..exact.losses import QuerySet
    from ..insight.mean import mean_influence
    from ..run.calibrate import TWINS
    from ..run.pieces import clear_work, work_folder
    from ..run.queries import open_queries
    from ..workers import keep_freed_memory
    from .leave_out import mark
    from .query import Request

    keep_freed_memory()
    output.plotting(plot)
    name = recipes.confirm(run, recipe, trust_recipe)
    opened = open_queries(run, [queries], name)
    influence = mean_influence(opened.run, opened.model, opened.loss, opened.batches[queries], method=method)
    folder = work_folder(run) / CHECKED
    with output.one_bar("retrain") as progress:
        result = check_result(
            opened.run, name, influence, QuerySet(queries, mean=True, run=run), random=samples, seed=seed, twins=TWINS,
            workers=workers, cache=folder, progress=progress,
        )  # fmt: skip
    clear_work(run, CHECKED)

    def print_tables() -> None:
        floor = 0.0 if result.floor is None else float(result.floor[0])
        columns = zip(result.samples, result.predicted[:, 0].tolist(), result.retrained[:, 0].tolist(), strict=True)
        rows = [
            (str(x), output.number(p), mark(r, abs(r) > floor), "at random" if k >= result.ends else "first or last")
            for k, (x, p, r) in sorted(enumerate(columns), key=lambda row: -row[1][1])
        ]
        output.table("Change of the loss without the sample", ("sample", "predicted", "retrained", "chosen"), rows)
        output.sentence(f"In brackets: no larger than rounding alone makes it ({floor:.2g}).")

    request = Request(run, [queries], "final", False, "auto", recipe, True, plot, notes, json)
    request.finish(result, print_tables)
