r"""The losses of queries and of steps, and their derivatives, for several directions at once.

With L = Σ_z w_z ℓ(θ, z) of one step and a direction s, the scalar φ = ⟨∇L, s⟩ holds both things that a backward sweep needs:

    ∂φ/∂w_z = ⟨∇ℓ(θ, z), s⟩                 of every sample, without any per-sample gradient
    ∂φ/∂θ   = H s                           the true Hessian of the step's loss

Queries are evaluated in eval mode, without drawing from the run's randomness.
Shapes:  Q queries or directions, B samples; parameters keep their own shapes, with Q in front.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..capture.model_state import in_mode
from ..errors import NumericalError, UsageError
from ..replay.queries import QuerySets
from ..replay.recipe import Recipe
from ..replay.tape import convert
from ..store import RunStore
from .twice import twice_differentiable

Pull = Callable[[Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


class StepGradient(NamedTuple):
    """∇L of one step, and how to differentiate it."""

    grads: list[Tensor]  # like the parameters, detached
    pull: Pull  # one direction s, like the parameters -> (⟨∇ℓ_z, s⟩ (B,), H s like the parameters)
    along: Callable[[Sequence[Tensor]], Tensor]  # one direction s -> ⟨∇ℓ_z, s⟩ (B,) alone, without H s
    of: Callable[[Sequence[int]], list[Tensor]]  # samples' positions -> their part of the gradient


def step_gradient(losses: Callable[[], Tensor], w: Tensor, parameters: Sequence[Tensor]) -> StepGradient:
    """∇ Σ w ℓ at the parameters' present values; `losses()` gives (B,)."""
    with torch.enable_grad(), twice_differentiable():
        each = losses()
        weights = w.to(each).detach().requires_grad_()
        grads = torch.autograd.grad((each * weights).sum(), parameters, create_graph=True, allow_unused=True)

    def differentiate(s: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        pairs = [(g, d) for g, d in zip(grads, s, strict=True) if g is not None and g.requires_grad]
        rows = torch.autograd.grad(
            [g for g, _ in pairs], inputs, [d for _, d in pairs], retain_graph=True, allow_unused=True
        )
        return or_zeros(rows, inputs)

    def pull(s: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        dots, *turned = differentiate(s, [weights, *parameters])
        return dots, turned

    def along(s: Sequence[Tensor]) -> Tensor:
        return differentiate(s, [weights])[0]

    def of(positions: Sequence[int]) -> list[Tensor]:
        rows = torch.autograd.grad(
            (each * weights)[list(positions)].sum(), parameters, retain_graph=True, allow_unused=True
        )
        return or_zeros(rows, parameters)

    return StepGradient([g.detach() for g in or_zeros(grads, parameters)], pull, along, of)


def or_zeros(rows: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """`rows`, with zeros for the inputs on which nothing depends."""
    return [torch.zeros_like(x) if r is None else r for r, x in zip(rows, inputs, strict=True)]


@dataclass(frozen=True)
class QuerySet:
    """One of the recipe's query sets: the loss of each of its samples, or their mean.

    Unlike a function, it follows the precision of the replay and can be sent to worker processes. With `run`, `name` may be one that
    only this run stores, or one query, NAME:INDEX.
    """

    name: str
    mean: bool = False
    run: Path | None = None


# a name alone: each sample's loss; several sets: their losses one after the other
QueryLoss = Callable[[nn.Module], Tensor] | QuerySet | tuple[QuerySet, ...] | str


def losses(recipe: Recipe, query: QueryLoss) -> Tensor:
    """(Q,) float64."""
    with in_mode(recipe.model), torch.random.fork_rng(devices=[]), torch.no_grad():
        values = _raw(recipe, query).double().clone()  # a query may be a view of a parameter
    if not bool(values.isfinite().all()):
        raise NumericalError(
            f"the loss of query {int((~values.isfinite()).nonzero()[0])} is NaN or Inf after a replay: training "
            "diverged. Lower the learning rate, or replay in float64."
        )
    return values


def gradients(recipe: Recipe, query: QueryLoss, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """∇ℓ(θ, q) of each query, like the parameters."""
    with in_mode(recipe.model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        values = _raw(recipe, query)
        rows = [torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True) for x in values]
    return [or_zeros(row, parameters) for row in rows]


def _raw(recipe: Recipe, query: QueryLoss) -> Tensor:
    if isinstance(query, str):
        query = QuerySet(query)
    if isinstance(query, tuple):
        return torch.cat([_raw(recipe, one) for one in query])
    values = _of_set(recipe, query) if isinstance(query, QuerySet) else query(recipe.model)
    if not isinstance(values, Tensor) or values.dim() > 1 or not values.numel():
        raise UsageError("the query's loss must be a scalar or a vector with one loss per query.")
    return values.reshape(-1)


def _of_set(recipe: Recipe, query: QuerySet) -> Tensor:
    if query.run is not None:
        batch = QuerySets(RunStore.open(query.run), recipe).select(query.name)
    elif query.name in recipe.queries:
        batch = recipe.queries[query.name]
    else:
        known = ", ".join(sorted(recipe.queries)) or "none"
        raise UsageError(f"the recipe has no query set {query.name!r}. It has: {known}.")
    dtype = next(recipe.model.parameters()).dtype
    values = recipe.loss(recipe.model, batch if query.run is None else convert(batch, dtype))
    return values.mean() if query.mean else values
