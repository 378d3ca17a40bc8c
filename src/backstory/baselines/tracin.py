r"""TracIn: gradient dot products along the way, weighted by the learning rate.

    checkpoints   Σ_κ η_κ ⟨∇ℓ(θ_κ, z), ∇ℓ(θ_κ, q)⟩          each checkpoint stands for one use of every sample
    in the run    c_t η_t w_z ⟨g_t(z), ∇ℓ(θ_T, q)⟩           each occurrence, from the rows that were recorded

Positive: the sample helped. The second is Backstory's own influence with the propagator left out (K = I): what later
steps did to the displacement is missing.
Assumes: plain SGD steps.
Pruthi et al., Estimating Training Data Influence by Tracing Gradient Descent, 2020.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..capture.model_state import load_weights, restored_weights
from ..errors import UsageError
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from ..run.run import Run
from ..run.scoring import Scores, collect
from ..run.sweep import backward
from ..store import RunStore
from .gradients import RANK_ONLY, Coordinates, Gradients, as_influence, gradients

Weights = Mapping[str, Tensor]
Checkpoint = tuple[Weights, float | Sequence[float]]  # by name; learning rate: of all, or of each parameter group


def tracin(
    recipe: Recipe,
    queries: Any,
    checkpoints: Iterable[Checkpoint],
    *,
    loss: LossFn | None = None,
    **coordinates: Unpack[Coordinates],
) -> Influence:
    """TracIn over `(weights, learning rate)` pairs, for example `run_checkpoints(run, recipe.model)`."""
    rows = gradients(recipe, **coordinates)
    total, count = torch.zeros(()), 0
    with restored_weights(recipe.model):
        for weights, rate in checkpoints:
            load_weights(recipe.model, weights)
            V = rows.of(queries, loss).double() * _rates(rows, rate)
            total, count = total + rows.products(V)[0], count + 1
    if not count:
        raise UsageError("checkpoints must have at least one (weights, learning rate) pair.")
    caveat = f"{count} checkpoints, each counted as one use of every sample with weight 1; plain SGD steps"
    return as_influence(recipe, rows.training, total, "TracIn", (RANK_ONLY, caveat, *rows.caveats))


def tracin_run(
    run: Run,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    at: int | str = "final",
    *,
    mode: str = "eval",
    unverified: bool = False,
) -> Influence:
    """TracIn from a run's recorded gradients, one score per occurrence before `at`; `model` is the model at `at`."""
    step = run.step_of(at)
    v, of_query = run.model_at(model, step, unverified=unverified).gradients(loss_fn, batch, mode)
    v = v.double()
    samples, steps = run.occurrences(step)
    caveats = ["units of the query's loss, for removing one occurrence; ignores what later steps did to its effect"]
    if (factor := _through_momentum(run.steps(0, step).groups)) > 1.01:
        caveats.append(f"momentum is ignored: influences are about {factor:.2g} × too small")
    caveats += [*of_query, *run.caveats()]
    scores = collect(_in_run(run, v, step), len(v), len(samples))
    kind, method = run.config.get("ids", "str"), "TracIn in the run"
    return Influence(scores, samples, steps, kind, method, at=step, caveats=tuple(caveats), lookup=run.content)


def _in_run(run: Run, v: Tensor, at: int) -> Scores:
    for chunk in backward(RunStore.open(run.path), at, dtype=torch.float64):
        scores = [s.clip * s.w * ((v * s.coefficients.rate) @ s.G.T) for s in chunk.steps]  # (Q, B) each
        yield chunk.row_start, torch.cat(scores, 1)


def _rates(rows: Gradients, rate: float | Sequence[float]) -> Tensor:
    """The rate of each coordinate, (p,)."""
    groups = [b.group for b in rows.blocks.blocks]
    count = max(groups) + 1
    rates = [rate] * count if isinstance(rate, int | float) else rate
    if len(rates) < count:
        raise UsageError(f"expected one learning rate per parameter group, got {len(rates)} for {count} groups.")
    of = torch.tensor([float(rates[g]) for g in groups], dtype=torch.float64)
    return of.repeat_interleave(torch.tensor(rows.dims))


def run_checkpoints(run: Run, model: nn.Module, steps: Sequence[int] | None = None) -> Iterator[Checkpoint]:
    """The checkpoints stored in a run (or those of `steps`), each with the learning rates of the next update.

    The final weights, which no update follows, come with the learning rates of the last update.
    """
    rates = run.steps().groups["rate"]  # (T, groups)
    twin = copy.deepcopy(model)
    for step in run.checkpoints if steps is None else steps:
        weights = copy.deepcopy(run.load_weights(twin, step).state_dict())
        yield weights, rates[min(step, len(rates) - 1)].tolist()


def _through_momentum(groups: Mapping[str, Any]) -> float:
    """How far momentum carries a gradient in all, (1−τ)/(1−μ) of its own step; 1 for Adam, whose τ is its μ."""
    return float(((1 - groups["tau"][-1]) / (1 - groups["momentum"][-1])).max())
