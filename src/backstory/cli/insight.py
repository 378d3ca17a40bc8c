"""`backstory timeline, evolution, overwriting, sources, harmful`: influence over time, and what sources are worth."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from . import data, recipes, show
from .options import Json

if TYPE_CHECKING:
    from ..results import Result

RunPath = Annotated[Path, typer.Argument(help="The folder of a recorded run.", show_default=False)]
Queries = Annotated[str, typer.Option(help="A query set: stored in the run, or of the recipe.")]
At = Annotated[str, typer.Option(help="final, or a checkpoint's step.")]
RecipeName = Annotated[str | None, typer.Option("--recipe", help="package.module:function that gives model and loss.")]
Trusted = Annotated[bool, typer.Option("--trust-recipe", help="Import the recipe that is named in the run.")]
Plot = Annotated[Path | None, typer.Option(help="Write the figure to this HTML file, which needs no network.")]


def timeline(
    run: RunPath,
    queries: Queries,
    at: At = "final",
    recipe: RecipeName = None,
    trust_recipe: Trusted = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """When did training data matter? Mean influence of each step, by learning rate, and the phases of training."""
    from .. import insight

    q = _question(run, [queries], at, recipe, trust_recipe, plot)
    with show.progress() as say:
        found = insight.timeline(q.run, q.model, q.loss, q.batches[queries], q.at, progress=_said(say, "steps"))
    page = ("When training data mattered", f"Queries: {queries}. Phases: {found.phases.words}")
    if _written(found, page, plot, json):
        return
    show.out.print(f"Phases: {found.phases.words}", soft_wrap=True)
    _windows(found.phases.windows)
    _notes(found.remarks)


def evolution(
    run: RunPath,
    queries: Queries,
    by: Annotated[
        str, typer.Option(help="thirds (samples by first use), steps (occurrences by step), source or label.")
    ] = "thirds",
    ids: Annotated[str | None, typer.Option(help="Samples, with commas: these against all others.")] = None,
    recipe: RecipeName = None,
    trust_recipe: Trusted = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """How does the influence of groups of samples fade? Their mean influence on every stored checkpoint."""
    from .. import insight

    q = _question(run, [queries], "final", recipe, trust_recipe, plot)
    groups = by if ids is None else {"named": data.ids(run, [x.strip() for x in ids.split(",") if x.strip()])}
    with show.progress() as say:
        found = insight.evolution(
            q.run, q.model, q.loss, q.batches[queries], by=groups, progress=_said(say, "checkpoints")
        )
    page = ("How influence fades", f"Queries: {queries}. Groups: {by if ids is None else 'named samples'}.")
    if _written(found, page, plot, json):
        return
    rows = [(c, *(_number(x) for x in line)) for c, line in zip(found.checkpoints, found.mean.T, strict=True)]
    show.table("Mean influence of a sample on the model at each checkpoint", ("checkpoint", *found.groups), rows)
    _notes(found.remarks)


def overwriting(
    run: RunPath,
    queries: Queries,
    sample: Annotated[str, typer.Option(help="The sample whose influence is followed.")],
    step: Annotated[int | None, typer.Option(help="Only its occurrence at this step.")] = None,
    at: At = "final",
    k: Annotated[int, typer.Option(help="How many samples and steps to show.", min=1)] = 10,
    recipe: RecipeName = None,
    trust_recipe: Trusted = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Which later samples and steps overwrote a sample's influence?"""
    from .. import insight

    q = _question(run, [queries], at, recipe, trust_recipe, plot)
    (name,) = data.ids(run, [sample])
    with show.progress() as say:
        found = insight.overwriting(
            q.run, q.model, q.loss, q.batches[queries], name, q.at, step=step, progress=_said(say, "steps")
        )
    page = (f"What overwrote the influence of sample {name}", f"Queries: {queries}. {found.sign}.")
    if _written(found, page, plot, json):
        return
    parts = ("just_after", "momentum", "overwritten", "decay", "influence")
    named = (
        "just after its own steps",
        "+ through momentum",
        "− overwritten by later samples",
        "− lost to decay",
        "= left",
    )
    show.table(
        f"Sample {name}",
        ("influence", ""),
        [(n, _number(getattr(found, p))) for n, p in zip(named, parts, strict=True)],
    )
    rows = [(e.sample, _number(e.overwritten), e.step, e.occurrences) for e in found.overwritten_by[:k]]
    show.table("Overwritten by", ("sample", "overwritten", "most at step", "later occurrences"), rows)
    show.table("Overwritten at", ("step", "overwritten"), [(t, _number(x)) for t, x in found.top_steps(k)])
    _notes(found.remarks)


def sources(
    run: RunPath,
    queries: Annotated[
        list[str], typer.Option(help="A query set; several, each named so, are the domains of queries.")
    ],
    by: Annotated[str, typer.Option(help="source or label.")] = "source",
    at: At = "final",
    recipe: RecipeName = None,
    trust_recipe: Trusted = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """What is each source of data worth, and for which queries? With 95 % intervals."""
    from .. import insight

    q = _question(run, queries, at, recipe, trust_recipe, plot)
    with show.progress() as say:
        found = insight.sources(q.run, q.model, q.loss, q.batches, q.at, by=by, progress=_said(say, "steps"))
    page = ("What each source is worth", f"Queries: {', '.join(queries)}. {found.sign}.")
    if _written(found, page, plot, json):
        return
    rows = [
        (v.source, v.samples, _number(v.value), f"{_number(v.low)} to {_number(v.high)}", _number(v.per_sample))
        for v in found.total
    ]
    show.table(f"Value of each {by}: summed influence", (by, "samples", "value", "95 % interval", "per sample"), rows)
    if len(found.domains) > 1:
        cells = [(name, *(_number(x) for x in line)) for name, line in zip(found.sources, found.matrix, strict=True)]
        show.table("Value for each domain of queries", (by, *found.domains), cells)
    _notes(found.remarks)


def harmful(
    run: RunPath,
    queries: Queries,
    at: At = "final",
    k: Annotated[int, typer.Option(help="How many samples to show on either side.", min=1)] = 10,
    recipe: RecipeName = None,
    trust_recipe: Trusted = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Which samples hurt most over a query set, and which helped? With their text where the run holds it."""
    from .. import insight

    q = _question(run, [queries], at, recipe, trust_recipe, plot)
    with show.progress() as say:
        found = insight.harmful(q.run, q.model, q.loss, q.batches[queries], q.at, top=k, progress=_said(say, "steps"))
    page = (
        "The data that hurt and helped most",
        f"Queries: {queries}. {found.sign}. This page contains training data.",
    )
    if _written(found, page, plot, json):
        return
    for title, side in (("Hurt most", found.harmful), ("Helped most", found.helpful)):
        rows = [(s.sample, _number(s.influence), s.step, s.source or "", s.label or "", _short(s.text)) for s in side]
        show.table(title, ("sample", "influence", "step", "source", "label", "text"), rows)
    _notes(found.remarks)


COMMANDS = (timeline, evolution, overwriting, sources, harmful)


def _question(run: Path, queries: Sequence[str], at: str, recipe: str | None, trusted: bool, plot: Path | None) -> Any:
    """The run with its model and queries; what would fail after the work fails before it."""
    from ..insight import asked

    data.plotting(plot)
    return asked(run, list(queries), recipes.confirm(run, recipe, trusted), data.at(at))


def _written(result: "Result", page: tuple[str, str], plot: Path | None, json: bool) -> bool:
    """Write the page, and the JSON object if it is wanted; whether nothing more is to be printed."""
    if plot is not None:
        from ..results.figures import page as made

        plot.write_text(made(*page, *(result.figure(name) for name in result.drawings())), encoding="utf-8")
    if json:
        show.emit({**result.as_dict(), "plot": None if plot is None else str(plot)})
    elif plot is not None:
        show.out.print(f"Figure: {plot}", soft_wrap=True)
    return json


def _windows(windows: Sequence[Any]) -> None:
    """Where influence is high; nothing where the three phases were not found."""
    rows = [
        (
            w.name,
            f"{w.first} to {w.last - 1}",
            f"{w.level:.4g}",
            "–" if w.times_basin is None else f"{w.times_basin:.2f}",
        )
        for w in windows
    ]
    if rows:
        show.table("Where influence is high", ("window", "steps", "size by learning rate", "times the basin's"), rows)


def _said(say: Callable[[str, int, int], None], stage: str) -> Callable[[int, int], None]:
    return lambda done, total: say(stage, done, total)


def _number(x: float) -> str:
    return "–" if x != x else f"{x:+.4g}"


def _short(text: str | None, most: int = 80) -> str:
    """The beginning of a text in one line, as it is: brackets in it are no markup."""
    line = " ".join((text or "").split())
    return escape(line if len(line) <= most else line[: most - 1] + "…")


def _notes(notes: Sequence[str]) -> None:
    for note in notes:
        show.out.print(f"note: {note}", soft_wrap=True)
