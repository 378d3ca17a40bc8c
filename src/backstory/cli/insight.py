"""`backstory timeline, evolution, overwriting, sources, harmful`: influence over time, and what sources are worth."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UsageError
from .leave_out import BY, parse_groups
from .options import (
    At,
    Contraction,
    Json,
    Method,
    Notes,
    PerLayer,
    Plot,
    Queries,
    RecipeName,
    RunPath,
    Top,
    TrustRecipe,
    parse_ids,
)
from .output import columns_that_fit, curves, hits, number, sentence, spread, table
from .query import Request

if TYPE_CHECKING:
    from ..insight import Sources


def timeline(
    run: RunPath, queries: Queries, at: At = "final",
    method: Method = "auto", per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Show when training data mattered.

    Mean influence of each step per unit of learning rate, and the phases of training.
    """
    from .. import insight

    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, notes, json, method)
    with request.opened("timeline") as (q, options):
        result = insight.timeline(q.run, q.model, q.loss, q.batches[queries], q.at, **options)

    def print_tables() -> None:
        drawn = {"magnitude": result.size.tolist(), "signed mean": result.per_rate.tolist()}
        curves("Influence of one occurrence per unit of learning rate, by step", drawn)
        rows = [
            (w.name, f"{w.first} to {w.last - 1}", f"{w.level:.3g}", "–" if w.times_basin is None else f"{w.times_basin:.2f}")
            for w in result.phases.windows
        ]  # fmt: skip
        if rows:  # only where the three phases are there
            table(
                "Where influence is high", ("period", "steps", "mean |influence|", "relative to the low stretch"), rows
            )

    request.finish(result, print_tables)


def evolution(
    run: RunPath, queries: Queries, at: At = "final",
    by: Annotated[str, typer.Option(help=BY)] = "thirds",
    ids: Annotated[
        str | None, typer.Option(help="Comma-separated sample IDs, or a file with one ID per line, to compare with the rest.")
    ] = None,
    method: Method = "auto", per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Show how the influence of groups of samples changes.

    Their mean influence at every stored checkpoint.
    """
    from .. import insight

    groups = parse_groups(run, by, ids)
    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, notes, json, method)
    with request.opened("evolution") as (q, options):
        result = insight.evolution(q.run, q.model, q.loss, q.batches[queries], q.at, by=groups, **options)

    def print_tables() -> None:
        cells = [[number(x) for x in means] for means in result.mean]
        steps = [f"{c:,}" for c in result.checkpoints]
        places = spread(len(steps), columns_that_fit(steps, ("at step", *result.groups), cells))
        rows = [(name, *(row[k] for k in places)) for name, row in zip(result.groups, cells, strict=True)]
        table("", ("at step", *(steps[k] for k in places)), rows)
        if len(places) < len(steps):
            sentence(f"{len(places)} of {len(steps)} checkpoints fit here; --json has all of them.")

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
    sample: Annotated[str | None, typer.Argument(help="ID of the sample to follow.")] = None,
    option: Annotated[str | None, typer.Option("--sample", help="The same as an option.")] = None,
    step: Annotated[int | None, typer.Option(help="Only its occurrence at this step.")] = None,
    at: At = "final",
    top: Annotated[int, typer.Option(help="Results per table.", min=1)] = 10,
    per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Show which later samples and steps overwrote a sample.

    The terms are the recording's; the sample's exact influence is beside them if it is stored.
    """
    from .. import insight
    from ..results.words import command_on

    if (sample is None) == (option is None):
        how = command_on(run, "overwriting", "SAMPLE", "--queries", queries)
        raise UsageError(f"name one sample to follow: `{how}`, or --sample SAMPLE.")
    (name,) = parse_ids(run, [str(option if sample is None else sample)])
    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, notes, json)
    with request.opened("overwriting") as (q, options):
        result = insight.overwriting(q.run, q.model, q.loss, q.batches[queries], name, q.at, step=step, **options)

    def print_tables() -> None:
        terms = [(words, number(getattr(result, term))) for term, words in TERMS.items()]
        terms += [] if result.exact is None else [("exact influence", number(result.exact))]
        table("", (f"influence of sample {name}", ""), terms)
        samples = [(x.sample, number(x.overwritten), x.step, x.occurrences) for x in result.overwritten_by[:top]]
        table("Overwritten by", ("sample", "overwritten", "most at step", "later occurrences"), samples)
        steps = [(x.step, number(x.overwritten)) for x in result.top_steps(top)]
        table("Overwritten at", ("step", "overwritten"), steps)

    request.finish(result, print_tables)


def sources(
    run: RunPath,
    queries: Annotated[
        list[str],
        typer.Option(metavar="NAME[:INDEX]", help="Query set; repeat the option to compare several."),
    ],
    by: Annotated[str, typer.Option(help="Group samples by source or label.")] = "source",
    at: At = "final",
    method: Method = "auto", per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Value each data source, with 95 % intervals.

    With several query sets, also for each of them.
    """
    from .. import insight

    request = Request(run, queries, at, per_layer, contraction, recipe, trust_recipe, plot, notes, json, method)
    with request.opened("sources") as (q, options):
        result = insight.sources(q.run, q.model, q.loss, q.batches, q.at, by=by, **options)

    request.finish(result, lambda: print_sources(result))


def print_sources(result: "Sources") -> None:
    """What each source is worth in all, and for each query set; as many sets side by side as fit."""
    by, domains = result.by, result.domains
    rows = [
        (v.source, f"{v.samples:,}", number(v.value), f"{number(v.low)} to {number(v.high)}", number(v.per_sample))
        for v in result.total
    ]
    table("Summed influence of its samples", (by, "samples", "value", "95 % interval", "per sample"), rows)
    cells = [[number(x) for x in values] for values in result.matrix]
    size = columns_that_fit(domains, (by, *result.sources), cells)
    for lo in range(0, len(domains) if len(domains) > 1 else 0, size):
        part = [(name, *row[lo : lo + size]) for name, row in zip(result.sources, cells, strict=True)]
        table("Value for each query set", (by, *domains[lo : lo + size]), part)


def harmful(
    run: RunPath, queries: Queries, at: At = "final",
    top: Top = 10,
    without_last: Annotated[int, typer.Option(help="Ignore uses in this many of the last steps.", min=0)] = 0,
    method: Method = "auto", per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Rank the samples that hurt a whole query set most."""
    from .. import insight

    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, notes, json, method)
    with request.opened("harmful") as (q, options):
        batch = q.batches[queries]
        result = insight.harmful(q.run, q.model, q.loss, batch, q.at, top=top, without_last=without_last, **options)

    def print_tables() -> None:
        for title, side in (("Hurt most", result.harmful), ("Helped most", result.helpful)):
            hits(title, side)

    request.finish(result, print_tables)


COMMANDS = (timeline, evolution, overwriting, sources, harmful)
