"""The basis of every insight: influence on the mean loss of a query set, and their common options.

The mean over a query set of ⟨v_q, e⟩ is ⟨mean v, e⟩, so that the mean costs one query, however large the set. Exact values are used
where the run has them stored (`run.exact`), and every insight says which values it shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from ..results.influence import Influence
from ..results.origin import describe_mixture, join_remedies
from ..results.quality import Quality
from ..run.embed import ContractionChoice, Progress
from ..run.gradients import LossFn
from ..run.lookup import Lookup
from ..run.methods import seeks_exact
from ..run.run import Run

FORM = ("method", "per_layer", "contraction")  # options that decide whether exact values are used


class SweepOptions(TypedDict, total=False):
    """How the run is passed over."""

    per_layer: bool  # parameters as independent, as the paper does
    contraction: ContractionChoice
    progress: Progress | None


class CheckedOptions(SweepOptions, total=False):
    """The same for a model whose weights are compared with the run's."""

    unverified: bool  # allows a model whose weights the run does not know


class Options(CheckedOptions, total=False):
    """What every insight takes beside what it is about."""

    method: str  # "auto" (exact values where they are stored), "exact", "adjoint" (a reverse sweep) or "embeddings"


def sweep_options(options: CheckedOptions) -> SweepOptions:
    """Those that a ready query gradient takes too."""
    return cast(SweepOptions, {k: v for k, v in options.items() if k not in ("unverified", "method")})


def mean_gradient(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, at: int, *, unverified: bool = False
) -> tuple[Tensor, list[str], int]:
    """`(gradient (1, p) of the queries' mean loss, caveats, how many queries)`."""
    v, caveats = run.model_at(model, at, unverified=unverified).gradients(loss, batch)
    return v.mean(0, keepdim=True), [*caveats, _about_mean(len(v))], len(v)


def _about_mean(queries: int) -> str:
    return f"influence on the mean loss of {queries:,} {'query' if queries == 1 else 'queries'}"


def mean_influence(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, at: int | str = "final", **options: Unpack[Options]
) -> Influence:
    """Influence of every occurrence before `at` on the queries' mean loss, one query: exact where that is stored."""
    step = run.step_of(at)
    found = find_exact(run, model, loss, batch, step, options, mean=True)
    if found.result is not None:
        return found.result
    v, caveats, queries = mean_gradient(run, model, loss, batch, step, unverified=options.get("unverified", False))
    method, notes = options.get("method", "auto"), (*caveats, *found.notes)
    result = run.query_gradients(v, step, method=method, caveats=notes, **sweep_options(options))
    return replace(result, remedy=run.remedy(batch, step), quality=_quality(run, step, batch, queries, options))


def find_exact(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, at: int, options: Options, *, mean: bool
) -> Lookup:
    """The stored exact result of the queries or of their mean loss, where the options allow one."""
    form, unverified = cast(Any, {k: v for k, v in options.items() if k in FORM}), options.get("unverified", False)
    if not seeks_exact(**form):
        return Lookup()
    return run.find_exact(
        model, loss, batch, at, mean=mean, method=options.get("method", "auto"), unverified=unverified
    )


def mean_influences(
    run: Run,
    gradients: Mapping[str, tuple[Tensor, Sequence[str]]],
    batches: Mapping[str, Any],
    at: int | str = "final",
    **options: Unpack[SweepOptions],
) -> dict[str, Influence]:
    """From the recording for several query sets by name, each given by its queries' gradients (Q, p) and their caveats: one sweep for all."""
    step, means = run.step_of(at), [v.mean(0, keepdim=True) for v, _ in gradients.values()]
    every = run.query_gradients(torch.cat(means), step, **options)
    out = {}
    for i, (name, (v, caveats)) in enumerate(gradients.items()):
        told = (*caveats, _about_mean(len(v)), *every.caveats)
        judged = _quality(run, step, batches[name], len(v), options)
        out[name] = replace(every.only(i), caveats=told, remedy=run.remedy(batches[name], step), quality=judged)
    return out


def _quality(run: Run, step: int, batch: Any, losses: int, options: Mapping[str, Any]) -> Quality:
    """As it was measured for the mean of so many losses of a batch."""
    form = {k: options[k] for k in FORM if k in options}
    return run.quality(step, mean=run.is_mean(batch, step, losses), **form)


def about_all(influences: Sequence[Influence], names: Sequence[str], what: str) -> dict[str, Any]:
    """What a result has that is made from several influences, by name: also which of them are exact, where not all are."""
    recorded = [x for x in influences if x.recording is not None] or influences
    mixture = describe_mixture([x.method for x in influences], names, what)
    caveats = dict.fromkeys((*mixture, *(text for x in influences for text in x.caveats)))
    return {
        "at": influences[-1].at,
        "caveats": tuple(caveats),
        "quality": recorded[-1].quality,
        "recording": recorded[-1].recording,
        "remedy": join_remedies(x.remedy for x in influences),
    }
