"""`backstory query`, and how every command with queries begins and ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import output, recipes
from .options import (
    At,
    Contraction,
    Json,
    Method,
    Notes,
    Per,
    PerLayer,
    Plot,
    Queries,
    RecipeName,
    RunPath,
    Top,
    TrustRecipe,
)

if TYPE_CHECKING:
    from ..results.result import Result
    from ..run.queries import Queries as OpenQueries


class Request(NamedTuple):
    """What every command with queries takes, as it was typed."""

    run: Path
    queries: Sequence[str]
    at: int | str
    per_layer: bool
    contraction: Any
    recipe: str | None
    trust_recipe: bool
    plot: Path | None
    notes: bool
    json: bool
    method: str | None = None  # None: the command has no choice

    @contextmanager
    def opened(self, stage: str) -> "Iterator[tuple[OpenQueries, dict[str, Any]]]":
        """`(run, model, loss and batches, how to pass over the run)`; what cannot work is refused before any work."""
        from ..run.queries import open_queries

        output.plotting(self.plot)
        name = recipes.confirm(self.run, self.recipe, self.trust_recipe)  # a prompt and a bar do not share a terminal
        queries = open_queries(self.run, self.queries, name, self.at)
        with output.one_bar(stage) as progress:
            options = {"per_layer": self.per_layer, "contraction": self.contraction, "progress": progress}
            yield queries, options | ({} if self.method is None else {"method": self.method})

    def finish(
        self, result: "Result", print_tables: Callable[[], None], values: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Write the figures, then print JSON, or the title, the tables and the notes."""
        if self.plot is not None:
            output.write_page(result, self.plot, f"Queries: {', '.join(self.queries)}.")
        if self.json:
            output.emit((values or result.as_dict)())
            return
        output.sentence(result.title)
        print_tables()
        output.remarks(result, self.notes)
        if self.plot is not None:
            output.line(f"Figure: {self.plot}")


def query(
    run: RunPath, queries: Queries, at: At = "final", top: Top = 5, per: Per = "sample",
    method: Method = "auto", per_layer: PerLayer = False, contraction: Contraction = "auto", recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False, plot: Plot = None, notes: Notes = False, json: Json = False,
) -> None:  # fmt: skip
    """Rank the training samples that helped and hurt a query."""
    request = Request(run, [queries], at, per_layer, contraction, recipe, trust_recipe, plot, notes, json, method)
    with request.opened("query") as (q, options):
        result = q.run.query(q.model, q.loss, q.batches[queries], q.at, **options)

    def print_tables() -> None:
        output.sentence(q.describe(queries))
        for title, side in zip(("Helped most", "Hurt most"), result.hits(top, per=per), strict=True):
            output.hits(title, side)

    request.finish(result, print_tables, lambda: result.as_dict(top=top, per=per))
