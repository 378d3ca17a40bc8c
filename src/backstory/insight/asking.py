"""What every insight begins with: a run, a model at one of its steps, and a set of queries; by hand, or by names from outside.

The mean over a query set of ⟨v_q, e⟩ is ⟨mean v, e⟩, so that a question about the mean costs one query, however large the set.
"""

from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack, cast

from torch import Tensor, nn

from ..errors import UsageError
from ..replay.recipe import load_recipe
from ..results.influence import Influence
from ..run.embed import ContractionChoice, Progress
from ..run.gradients import LossFn, compute_query_gradients
from ..run.run import Run


class Question(NamedTuple):
    """A run and everything that a question needs."""

    run: Run
    model: nn.Module  # with the weights of step `at`
    loss: LossFn
    batches: dict[str, Any]  # query set -> batch
    at: int


def asked(path: str | Path, queries: list[str], recipe: str, at: int | str = "final") -> Question:
    """A run with its recipe's model and loss, and query sets by name: stored in the run, or of the recipe."""
    run = Run(path)
    made = load_recipe(recipe, run.config.get("recipe_args") if recipe == run.config.get("recipe") else None)
    step = run.step_of(at)
    run.load_weights(made.model, step)
    known = {**made.queries, **{name: None for name in run.query_sets}}
    if unknown := [name for name in queries if name not in known]:
        said = ", ".join(sorted(known)) or "none"
        raise UsageError(f"there is no query set {unknown[0]!r}; the run and its recipe have: {said}.")
    if len(set(queries)) < len(queries):
        raise UsageError("a query set is named twice; name each once.")
    stored = {name: run.queries(name) for name in queries if name in run.query_sets}
    return Question(run, made.model, made.loss, {n: stored.get(n, made.queries.get(n)) for n in queries}, step)


class SweepOptions(TypedDict, total=False):
    """How the run is passed over."""

    per_layer: bool  # parameters as independent, as the paper does
    contraction: ContractionChoice
    progress: Progress | None


class Options(SweepOptions, total=False):
    """What every insight takes beside what it is about."""

    unverified: bool  # allows a model whose weights the run does not know


def sweep_options(options: Options) -> SweepOptions:
    """Those that a ready query gradient takes too."""
    return cast(SweepOptions, {k: v for k, v in options.items() if k != "unverified"})


def mean_gradient(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, at: int, *, unverified: bool = False
) -> tuple[Tensor, list[str]]:
    """`(gradient (1, p) of the queries' mean loss, caveats)`."""
    v, caveats = compute_query_gradients(run.store, model, loss, batch, at, unverified=unverified)
    return v.mean(0, keepdim=True), [*caveats, f"the mean over {len(v)} {'query' if len(v) == 1 else 'queries'}"]


def mean_influence(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, at: int | str = "final", **options: Unpack[Options]
) -> Influence:
    """Influence of every occurrence before `at` on the queries' mean loss: one query."""
    step = run.step_of(at)
    v, caveats = mean_gradient(run, model, loss, batch, step, unverified=options.get("unverified", False))
    return run.query_gradients(v, step, caveats=caveats, **sweep_options(options))
