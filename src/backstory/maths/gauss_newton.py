r"""The Gauss-Newton matrix of a sample, taken apart: what its own gradient holds of it, and the rest.

With H the Hessian of the loss at the outputs f of a sample, δ = ∂ℓ/∂f, g = Jᵀδ its gradient, and H⁺ the inverse of H where it has one,

    Jᵀ H J  =  κ g gᵀ  +  Jᵀ R J,      κ = 1/(δᵀ H⁺ δ),      R = H − κ δ δᵀ ⪰ 0

κ is the largest number that leaves R positive. The first part needs no backward pass and no row but the gradient's: one number of each
occurrence. For a seed u with E[u uᵀ] = H,

    u' = u − a δ,   a = κ δᵀ H⁺ u      has  E[u' u'ᵀ] = R,      so that the row of the rest is  h' = h − a g

and δ, which is known only once the loss has been differentiated, is not needed for the seed.

    cross-entropy   H = diag(p) − ppᵀ      δᵀ H⁺ u = Σ_c δ_c u_c / p_c           κ = p_y/(1 − p_y) for a label y
    bce             H = c diag(p(1−p))     δᵀ H⁺ u = Σ_o δ_o u_o / (c p_o(1−p_o))

For two classes, or one output of BCE, nothing is left: R = 0. Seeds: with H = Σ_j λ_j u_j u_jᵀ, λ₁ ≥ λ₂ ≥ …, k seeds of a sample are

    √λ_j u_j for j < k,   and   Σ_{j ≥ k} ± √λ_j u_j,  signs drawn:    E Σ u uᵀ = H,  exactly H where k is the rank of H

Shapes:  f, δ, u (B, *positions, C); κ, a (B,). Seeds leave out c, as those of `curvature` do.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LEAST = 1e-300  # of a probability


def own_scale(f: Tensor, delta: Tensor, kind: str, c: float = 1.0) -> Tensor:
    """κ, float64; 0 where δ is 0, or not finite."""
    size = _apart(delta.double().square() / _diagonal(f, kind)).sum(1) / c
    known = (size > 0) & size.isfinite()
    return torch.where(known, 1 / torch.where(known, size, 1.0), 0.0)


def tilt(f: Tensor, delta: Tensor, seed: Tensor, kind: str, c: float = 1.0) -> Tensor:
    """a, float64: how much of its gradient is taken out of each sample's row."""
    met = _apart(delta.double() * seed.double() / _diagonal(f, kind)).sum(1) / c
    return own_scale(f, delta, kind, c) * met


def signed_seeds(outputs: Tensor, kind: str, k: int, generator: torch.Generator) -> Iterator[Tensor]:
    """k seeds, shaped like `outputs`; random numbers come from `generator` (on the CPU) alone."""
    f = outputs.detach()
    factors = _factors(f, kind)  # (B, C, C) rows √λ_j u_j
    signs = 2 * torch.randint(0, 2, factors.shape[:2], generator=generator).to(factors) - 1
    for j in range(k):
        last = j == k - 1
        seed = (factors[:, j:] * signs[:, j:, None]).sum(1) if last else factors[:, j]
        yield seed.reshape(f.shape).to(f)


def _factors(f: Tensor, kind: str) -> Tensor:
    """Rows √λ_j u_j of each sample, the largest first, float64."""
    p = _apart(_probabilities(f, kind))
    if kind == "bce":
        values, order = (p * (1 - p)).sort(stable=True, dim=1, descending=True)
        return values.sqrt()[..., None] * torch.nn.functional.one_hot(order, p.shape[1]).double()
    values, U = torch.linalg.eigh(torch.diag_embed(p) - p[:, :, None] * p[:, None])
    rows: Tensor = (U * values.clamp_min(0).sqrt()[:, None]).mT
    return (rows - rows.mean(2, keepdim=True)).flip(1)  # the root of an eigenvalue that is 0 is no rounding


def _diagonal(f: Tensor, kind: str) -> Tensor:
    """What H⁺ divides by: of cross-entropy on vectors that add up to 0."""
    p = _probabilities(f, kind)
    return (p * (1 - p) if kind == "bce" else p).clamp_min(LEAST)


def _apart(x: Tensor) -> Tensor:
    """(B, C), a single output of a sample too."""
    return x.reshape(len(x), -1)


def _probabilities(f: Tensor, kind: str) -> Tensor:
    wide = f.detach().double()
    return wide.sigmoid() if kind == "bce" else wide.softmax(-1)
