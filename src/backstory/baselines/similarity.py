r"""Gradient dot product and gradient cosine: how alike a sample's and a query's gradients are at the end.

    dot(z, q)    = ⟨∇ℓ(θ, z), ∇ℓ(θ, q)⟩
    cosine(z, q) = dot(z, q) / (‖∇ℓ(θ, z)‖ ‖∇ℓ(θ, q)‖)

Positive: a step along the sample lowers the query's loss, so the sample helped. Ranks only: the rate and the number of
steps are not in it.
Assumes: plain SGD, and that gradients at the end are what they were in training.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .rows import Coordinates, Gradients, gradients
from .training import RANK_ONLY, answer


def gradient_dot(
    recipe: Recipe, queries: Any, *, loss: LossFn | None = None, **coordinates: Unpack[Coordinates]
) -> Influence:
    """⟨∇ℓ(θ, z), ∇ℓ(θ, q)⟩ at the weights of `recipe.model`; `loss` of the queries, by default the recipe's."""
    rows = gradients(recipe, **coordinates)
    dots, _ = _products(rows, rows.ask(queries, loss))
    return answer(recipe, rows.training, dots, "gradient dot product", (RANK_ONLY, *rows.notes))


def gradient_cosine(
    recipe: Recipe, queries: Any, *, loss: LossFn | None = None, **coordinates: Unpack[Coordinates]
) -> Influence:
    """The cosine of the same two gradients; 0 where one of them is 0."""
    rows = gradients(recipe, **coordinates)
    V = rows.ask(queries, loss).double()  # (Q, p)
    dots, norms = _products(rows, V)
    size = V.norm(dim=1)[:, None] * norms  # (Q, N)
    cosines = torch.where(size > 0, dots / size.clamp(min=1e-300), torch.zeros_like(dots))
    return answer(recipe, rows.training, cosines, "gradient cosine", (RANK_ONLY, *rows.notes))


def _products(rows: Gradients, V: Tensor) -> tuple[Tensor, Tensor]:
    """`(V Gᵀ (Q, N), norms of G (N,))`, one batch in memory at a time."""
    V = V.double()
    dots = torch.zeros(len(V), len(rows.training), dtype=torch.float64)
    norms = torch.zeros(len(rows.training), dtype=torch.float64)
    for columns, G in rows.stream():
        dots[:, columns] = V @ G.double().T
        norms[columns] = G.double().norm(dim=1)
    return dots, norms
