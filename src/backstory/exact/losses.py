r"""What a trained model is asked: the losses of the queries, and their gradients.

The model is asked in eval mode, without drawing from the run's randomness.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NumericalError, UsageError
from ..replay.recipe import Recipe
from .derivatives import batched_grad, or_zeros


@dataclass(frozen=True)
class QuerySet:
    """One of the recipe's own query sets: the loss of each of its samples, or their mean.

    Unlike a function, it follows the precision of the replay, and travels to worker processes.
    """

    name: str
    mean: bool = False


QueryLoss = Callable[[nn.Module], Tensor] | QuerySet | str  # a name alone: each sample's loss


def losses(recipe: Recipe, query: QueryLoss) -> Tensor:
    """(Q,) float64."""
    with _asked(recipe.model), torch.no_grad():
        found = _raw(recipe, query).double().clone()  # a query may be a view of a parameter
    if not bool(found.isfinite().all()):
        raise NumericalError(
            f"the loss of query {int((~found.isfinite()).nonzero()[0])} is NaN or Inf after a replay: the training "
            "diverged. Lower the rate, or replay in float64."
        )
    return found


def gradients(recipe: Recipe, query: QueryLoss, parameters: Sequence[Tensor]) -> list[Tensor]:
    """∇ℓ(θ, q) of all queries: one (Q, *shape) for each parameter."""
    with _asked(recipe.model), torch.enable_grad():
        found = _raw(recipe, query)
        rows = batched_grad([found], parameters, [torch.eye(len(found)).to(found)])
    return or_zeros(rows, parameters, len(found))


def _raw(recipe: Recipe, query: QueryLoss) -> Tensor:
    if isinstance(query, str):
        query = QuerySet(query)
    if not isinstance(query, QuerySet):
        found = query(recipe.model)
    elif query.name not in recipe.queries:
        known = ", ".join(sorted(recipe.queries)) or "none"
        raise UsageError(f"the recipe has no query set {query.name!r}; it has: {known}.")
    else:
        found = recipe.loss(recipe.model, recipe.queries[query.name])
        found = found.mean() if query.mean else found
    if not isinstance(found, Tensor) or found.dim() > 1 or not found.numel():
        raise UsageError("the query's loss must be a scalar, or a vector with one loss for each query.")
    return found.reshape(-1)


@contextmanager
def _asked(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; the flags of all its modules are put back."""
    flags = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag
