"""A question from outside of any program: by run, query set and recipe, answered in plain values."""

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..replay.recipe import load_recipe
from ..run.embed import ContractionChoice, Progress
from ..run.run import Run


def ask(
    path: Path,
    queries: str,
    *,
    index: int | None,
    at: int | str,
    k: int,
    per: str,
    recipe: str,
    per_layer: bool = False,
    contraction: ContractionChoice = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`{"hits": [...], "harmful": [...], …}`: hits highest first, harmful lowest first."""
    run = Run(path)
    made = load_recipe(recipe, run.config.get("recipe_args") if recipe == run.config.get("recipe") else None)
    step = run.step_of(at)
    run.load_weights(made.model, step)
    if queries in run.query_sets:
        batch = run.queries(queries)
    elif queries in made.queries:
        batch = made.queries[queries]
    else:
        known = ", ".join(sorted({*run.query_sets, *made.queries})) or "none"
        raise UsageError(f"there is no query set {queries!r}; the run and its recipe have: {known}.")
    answer = run.query(
        made.model, made.loss, batch, step, per_layer=per_layer, contraction=contraction, progress=progress
    )
    which: int | str | None = "mean" if index is None and answer.n_queries > 1 else index
    return {
        "run": str(path),
        "set": queries,
        **answer.as_dict(top=k, per=per, query=which),
        "remarks": list(answer.remarks),
    }
