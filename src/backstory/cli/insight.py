"""`backstory timeline, evolution, overwriting, sources, harmful`: influence over time, and what sources are worth."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import At, Contraction, Json, PerLayer, Plot, Queries, RecipeName, RunPath, Top, TrustRecipe, parse_ids
from .output import number, shorten, table
from .query import Request

if TYPE_CHECKING:
    from ..insight import Sources


def timeline(
    run: RunPath, queries: Queries, at: At = "final",
    per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, json: Json = False,
) -> None:  # fmt: skip
    """When did training data matter? Mean influence of each step by learning rate, and the phases of training."""
    from .. import insight

    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, json)
    with request.opened("steps") as (q, options):
        result = insight.timeline(q.run, q.model, q.loss, q.batches[queries], q.at, **options)

    def print_tables() -> None:
        rows = [
            (w.name, f"{w.first} to {w.last - 1}", f"{w.level:.4g}", "–" if w.times_basin is None else f"{w.times_basin:.2f}")
            for w in result.phases.windows
        ]  # fmt: skip
        if rows:  # only where the three phases are there
            table("Where influence is high", ("window", "steps", "size by learning rate", "times the basin's"), rows)

    request.finish(result, print_tables)


def evolution(
    run: RunPath, queries: Queries, at: At = "final",
    by: Annotated[
        str, typer.Option(help="thirds (samples by first use), steps (occurrences by step), source or label.")
    ] = "thirds",
    ids: Annotated[str | None, typer.Option(help="Comma-separated sample IDs to compare with the rest.")] = None,
    per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, json: Json = False,
) -> None:  # fmt: skip
    """How does the influence of groups of samples fade? Their mean influence on every stored checkpoint."""
    from .. import insight

    groups = by if ids is None else {"named": parse_ids(run, [x.strip() for x in ids.split(",") if x.strip()])}
    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, json)
    with request.opened("checkpoints") as (q, options):
        result = insight.evolution(q.run, q.model, q.loss, q.batches[queries], q.at, by=groups, **options)

    def print_tables() -> None:
        rows = [(c, *map(number, means)) for c, means in zip(result.checkpoints, result.mean.T, strict=True)]
        table("Mean influence of a sample", ("checkpoint", *result.groups), rows)

    request.finish(result, print_tables)


TERMS = {
    "just_after": "just after its own steps",
    "momentum": "+ through momentum",
    "overwritten": "− overwritten by later samples",
    "decay": "− lost to weight decay",
    "influence": "= left",
}


def overwriting(
    run: RunPath, queries: Queries,
    sample: Annotated[str, typer.Option(help="The sample whose influence is followed.")],
    step: Annotated[int | None, typer.Option(help="Only its occurrence at this step.")] = None,
    at: At = "final", top: Top = 10,
    per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, json: Json = False,
) -> None:  # fmt: skip
    """Which later samples and steps overwrote a sample's influence?"""
    from .. import insight

    (name,) = parse_ids(run, [sample])
    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, json)
    with request.opened("steps") as (q, options):
        result = insight.overwriting(q.run, q.model, q.loss, q.batches[queries], name, q.at, step=step, **options)

    def print_tables() -> None:
        terms = [(words, number(getattr(result, term))) for term, words in TERMS.items()]
        table(f"Sample {name}", ("influence", ""), terms)
        samples = [(x.sample, number(x.overwritten), x.step, x.occurrences) for x in result.overwritten_by[:top]]
        table("Overwritten by", ("sample", "overwritten", "most at step", "later occurrences"), samples)
        table(
            "Overwritten at", ("step", "overwritten"), [(x.step, number(x.overwritten)) for x in result.top_steps(top)]
        )

    request.finish(result, print_tables)


def sources(
    run: RunPath,
    queries: Annotated[
        list[str],
        typer.Option(metavar="NAME[:INDEX]", help="A query set; repeat the option for several domains of queries."),
    ],
    by: Annotated[str, typer.Option(help="source or label.")] = "source",
    at: At = "final",
    per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, json: Json = False,
) -> None:  # fmt: skip
    """What is each source of data worth, and for which queries? With 95 % intervals."""
    from .. import insight

    request = Request(run, queries, at, per_layer, contraction, recipe, trust_recipe, plot, json)
    with request.opened("steps") as (q, options):
        result = insight.sources(q.run, q.model, q.loss, q.batches, q.at, by=by, **options)

    request.finish(result, lambda: print_sources(result))


def print_sources(result: "Sources") -> None:
    """What each source is worth in all, and for each domain of queries."""
    rows = [
        (v.source, v.samples, number(v.value), f"{number(v.low)} to {number(v.high)}", number(v.per_sample))
        for v in result.total
    ]
    by = result.by
    table(f"Value of each {by}: summed influence", (by, "samples", "value", "95 % interval", "per sample"), rows)
    if len(result.domains) > 1:
        cells = [(name, *map(number, values)) for name, values in zip(result.sources, result.matrix, strict=True)]
        table("Value for each domain of queries", (by, *result.domains), cells)


def harmful(
    run: RunPath, queries: Queries, at: At = "final",
    top: Top = 10,
    without_last: Annotated[int, typer.Option(help="Leave out uses in so many of the last steps.", min=0)] = 0,
    per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, json: Json = False,
) -> None:  # fmt: skip
    """Which samples hurt most over a query set, and which helped? With their text if the run stores it."""
    from .. import insight

    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, json)
    with request.opened("steps") as (q, options):
        batch = q.batches[queries]
        result = insight.harmful(q.run, q.model, q.loss, batch, q.at, top=top, without_last=without_last, **options)

    def print_tables() -> None:
        for title, side in (("Hurt most", result.harmful), ("Helped most", result.helpful)):
            rows = [
                (s.sample, number(s.influence), s.step, s.source or "", s.label or "", shorten(s.text)) for s in side
            ]
            table(title, ("sample", "influence", "step", "source", "label", "text"), rows)

    request.finish(result, print_tables)


COMMANDS = (timeline, evolution, overwriting, sources, harmful)
