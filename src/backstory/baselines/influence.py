r"""The influence function: one Newton step away from the trained model.

    IF(z, q) = 1/N ∇ℓ(θ, q)ᵀ (H + λI)⁻¹ ∇ℓ(θ, z)  ≈  ℓ(without z, q) − ℓ(with z, q)

Positive: the sample helped. H is the curvature of the mean loss of the N samples, 1/N Σ g gᵀ (`fisher`: the empirical
Fisher, as LoGRA has it) or 1/N Σ Jᵀ (∇²_f ℓ) J (`ggn`). λ is `damping`, or `damping` × the mean eigenvalue of H; where
training had an L2 penalty λ/2 ‖θ‖², its λ belongs into it. In random coordinates (`rank=`) this is LoGRA.
The paper's comparison has λ = 1e-3.

Assumes: θ is a minimum of the mean loss, whatever the order and the number of epochs: it knows no time.
Shapes:  N samples, Q queries, p coordinates.
Koh and Liang 2017; Choe et al., What is Your Data Worth to GPT?, 2024.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from ..errors import UsageError, check_one_of
from ..replay.recipe import Recipe
from ..results.influence import Influence
from ..run.gradients import LossFn
from .curvature import by_moment, by_other_rows, by_rows, moment, output_factors, output_loss
from .gradients import Coordinates, Gradients, as_influence, check_size, gradients

HESSIANS = ("fisher", "ggn")


def influence_function(
    recipe: Recipe,
    queries: Any,
    *,
    loss: LossFn | None = None,
    damping: float = 1e-3,
    relative: bool = False,
    per_layer: bool = False,
    hessian: str = "fisher",
    **coordinates: Unpack[Coordinates],
) -> Influence:
    """The influence function at the weights of `recipe.model`; `per_layer=True` treats parameters as independent."""
    return influence_sweep(
        recipe, queries, [damping], loss=loss, relative=relative, per_layer=per_layer, hessian=hessian, **coordinates
    )[0]


def influence_sweep(
    recipe: Recipe,
    queries: Any,
    dampings: Sequence[float],
    *,
    loss: LossFn | None = None,
    relative: bool = False,
    per_layer: bool = False,
    hessian: str = "fisher",
    **coordinates: Unpack[Coordinates],
) -> list[Influence]:
    """One result for each damping, from one pass over the data."""
    check_one_of("hessian", hessian, HESSIANS)
    if any(d < 0 for d in dampings):
        raise UsageError(f"dampings must be ≥ 0, got {list(dampings)}.")
    rows = gradients(recipe, **coordinates)
    V, G = rows.of(queries, loss), rows.stack()  # (Q, p), (N, p)
    cuts = rows.slices if per_layer else [slice(0, rows.width)]
    parts = _fisher(V, G, cuts) if hessian == "fisher" else _ggn(rows, V, G, cuts)
    method = "influence function" if rows.width == rows.full_width else "influence function (LoGRA)"
    out = []
    for damping in dampings:
        ridges = [len(G) * damping * (p.mean if relative else 1.0) for p in parts]
        scores = torch.stack([p.scores(ridge) for p, ridge in zip(parts, ridges, strict=True)]).sum(0)
        caveats = _caveats(damping, relative, per_layer, hessian, [p.mean for p in parts])
        out.append(as_influence(recipe, rows.training, scores, method, (*caveats, *rows.caveats)))
    return out


@dataclass(frozen=True)
class _Part:
    """One independent part of the coordinates."""

    mean: float  # eigenvalue of H, over all of its directions
    scores: Callable[[float], Tensor]  # N λ -> (Q, N)


def _fisher(V: Tensor, G: Tensor, cuts: Sequence[slice]) -> list[_Part]:
    means = [_squares(G[:, c]) / (len(G) * (c.stop - c.start)) for c in cuts]
    return [_Part(mean, partial(by_rows, V[:, c], G[:, c])) for mean, c in zip(means, cuts, strict=True)]


def _ggn(rows: Gradients, V: Tensor, G: Tensor, cuts: Sequence[slice]) -> list[_Part]:
    C, is_moment = _curvature(rows)

    def part(c: slice) -> _Part:
        H = C[c, c] if is_moment else C[:, c]
        trace = float(H.diagonal().sum()) if is_moment else _squares(H)
        mean = trace / (len(G) * (c.stop - c.start))
        if not is_moment and len(H) < H.shape[1]:
            return _Part(mean, partial(by_other_rows, V[:, c], G[:, c], H))
        return _Part(mean, partial(by_moment, V[:, c], G[:, c], H if is_moment else moment(H)))

    return [part(c) for c in cuts]


def _curvature(rows: Gradients) -> tuple[Tensor, bool]:
    """`(Σ Jᵀ ∇²ℓ J (p, p), True)`, or `(its rows (M, p), False)` where they are fewer than p."""
    recipe, parts = rows.recipe, []
    outputs = output_factors(recipe.model, recipe.loss, recipe.batches[rows.training.visits[0][0]][1]).shape[1]
    few = len(rows.training) * outputs < rows.width
    check_size(len(rows.training) * outputs if few else rows.width, rows.width, 8)
    H = torch.zeros(0 if few else rows.width, rows.width, dtype=torch.float64)
    for step, keep in rows.training.visits:
        batch = recipe.batches[step][1]
        U = output_factors(recipe.model, recipe.loss, batch)  # (B, C, C)
        for k in range(U.shape[2]):
            if not bool(U[keep, :, k].any()):
                continue
            J = rows.of(batch, output_loss(recipe.loss, U[:, :, k]))[keep]  # (n, p)
            if few:
                parts.append(J)
            else:
                H += moment(J)
    return (torch.cat(parts), False) if few else (H, True)


def _caveats(damping: float, relative: bool, per_layer: bool, hessian: str, means: Sequence[float]) -> tuple[str, ...]:
    curvature = "empirical Fisher 1/N Σ g gᵀ" if hessian == "fisher" else "Gauss–Newton matrix"
    size = f"{damping:g} × its mean eigenvalue {sum(means) / len(means):.3g}" if relative else f"{damping:g}"
    return (
        "units of the query's loss, for removing the sample and retraining to convergence",
        f"curvature: {curvature}, damping {size}, {'parameters treated as independent' if per_layer else 'joint'}",
        "assumes training converged to a minimum; ignores order and time",
    )


def _squares(rows: Tensor) -> float:
    return float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
