"""The basis of every insight: influence on the mean loss of a query set, and their common options.

The mean over a query set of ⟨v_q, e⟩ is ⟨mean v, e⟩, so that the mean costs one query, however large the set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from ..results.influence import Influence
from ..run.embed import ContractionChoice, Progress
from ..run.gradients import LossFn
from ..run.run import Run


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
    v, caveats = run.model_at(model, at, unverified=unverified).gradients(loss, batch)
    return v.mean(0, keepdim=True), [*caveats, _about_mean(len(v))]


def _about_mean(queries: int) -> str:
    return f"influence on the mean loss of {queries} {'query' if queries == 1 else 'queries'}"


def mean_influence(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, at: int | str = "final", **options: Unpack[Options]
) -> Influence:
    """Influence of every occurrence before `at` on the queries' mean loss: one query."""
    step = run.step_of(at)
    v, caveats = mean_gradient(run, model, loss, batch, step, unverified=options.get("unverified", False))
    return run.query_gradients(v, step, caveats=caveats, **sweep_options(options))


def mean_influences(
    run: Run,
    gradients: Mapping[str, tuple[Tensor, Sequence[str]]],
    at: int | str = "final",
    **options: Unpack[SweepOptions],
) -> dict[str, Influence]:
    """The same for several query sets by name, each given by its queries' gradients (Q, p) and their caveats: one sweep for all."""
    means = [v.mean(0, keepdim=True) for v, _ in gradients.values()]
    every = run.query_gradients(torch.cat(means), at, **options)
    out = {}
    for i, (name, (v, caveats)) in enumerate(gradients.items()):
        out[name] = replace(every.only(i), caveats=(*caveats, _about_mean(len(v)), *every.caveats))
    return out
