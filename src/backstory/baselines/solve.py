r"""Scores through an inverse curvature, on the smaller side of the table.

    V (GᵀG + ρI)⁻¹ Gᵀ  =  V Gᵀ (GGᵀ + ρI)⁻¹                        p × p on the left, N × N on the right
    V (CᵀC + ρI)⁻¹ Gᵀ  =  (V Gᵀ − V Cᵀ (CCᵀ + ρI)⁻¹ C Gᵀ) / ρ      Woodbury, for curvature rows C other than G

Positive where V and G point the same way. Sums run in float64; the products of float32 rows in float32, in chunks.
Shapes:  V (Q, p), G (N, p), C (M, p).
"""

import torch
from torch import Tensor

from ..errors import NumericalError

CHUNK = 8192
SINGULAR = 1e-13  # smallest to largest squared pivot


def products(A: Tensor, B: Tensor) -> Tensor:
    """A Bᵀ in float64."""
    wide = torch.promote_types(A.dtype, B.dtype)
    out = torch.zeros(len(A), len(B), dtype=torch.float64)
    for lo in range(0, A.shape[1], CHUNK):
        out += (A[:, lo : lo + CHUNK].to(wide) @ B[:, lo : lo + CHUNK].to(wide).T).double()
    return out


def moment(C: Tensor) -> Tensor:
    """CᵀC in float64."""
    out = torch.zeros(C.shape[1], C.shape[1], dtype=torch.float64)
    for lo in range(0, len(C), CHUNK):
        out += (C[lo : lo + CHUNK].T @ C[lo : lo + CHUNK]).double()
    return out


def solve(A: Tensor, ridge: float, B: Tensor) -> Tensor:
    """(A + ρI)⁻¹ B; refuses a singular matrix."""
    L, failed = torch.linalg.cholesky_ex(A + ridge * torch.eye(len(A), dtype=A.dtype))
    pivots = L.diagonal().square()
    if bool(failed) or not bool(pivots.isfinite().all()) or float(pivots.min() / pivots.max()) < SINGULAR:
        raise NumericalError(
            f"the curvature of {len(A):,} dimensions is singular: some direction has none. "
            "Pass damping=, a larger one, or fewer coordinates with rank=."
        )
    return torch.cholesky_solve(B, L)


def by_rows(V: Tensor, G: Tensor, ridge: float) -> Tensor:
    """V (GᵀG + ρI)⁻¹ Gᵀ, (Q, N)."""
    n, p = G.shape
    if p <= n:
        return by_moment(V, G, moment(G), ridge)
    if ridge <= 0:
        raise NumericalError(
            f"{p:,} coordinates and only {n:,} samples: their curvature is singular. Pass damping=, or fewer "
            "coordinates with rank=."
        )
    return solve(products(G, G), ridge, products(V, G).T).T


def by_moment(V: Tensor, G: Tensor, H: Tensor, ridge: float) -> Tensor:
    """V (H + ρI)⁻¹ Gᵀ for H (p, p)."""
    return products(solve(H, ridge, V.double().T).T, G)


def by_other_rows(V: Tensor, G: Tensor, C: Tensor, ridge: float) -> Tensor:
    """V (CᵀC + ρI)⁻¹ Gᵀ with fewer rows in C than coordinates."""
    if ridge <= 0:
        raise NumericalError(f"{C.shape[1]:,} coordinates and only {len(C):,} curvature rows: pass damping=.")
    bent = products(V, C) @ solve(products(C, C), ridge, products(C, G))
    return (products(V, G) - bent) / ridge
