r"""A projection learned from rows: sides first, then the best core inside their product, the same budget for all blocks.

The sides L, R of each parameter are the top eigenvectors of the rows' second moments, three times as wide as the rank that
was asked for. Inside vec(Lᵀ G R) the rows need fewer coordinates than the product has: with C = Σ κ x xᵀ over the rows x of
the warm-up, the core is the top eigenvectors of C. How many each parameter gets is decided by the eigenvalues of all
parameters together, so that the run as a whole has as many coordinates as rank × rank in each would give, or the fewest
that hold a share S of the rows' energy:

    Σ_i Σ_{k ≤ n_i} λ_ik  ≥  S E,      E = Σ κ ‖G‖² of all parameters, before any side,      n_i ≥ 1,  Σ n_i smallest

Eigenvalues are the energy along the eigenvectors, so taking the largest first is best for all parameters together.

Of a C more than twice as wide as what is looked for only the leading part is computed: a block of seeded random columns, turned towards it by repeated products
with C, then the eigenvectors of C inside it (subspace iteration with a Rayleigh-Ritz step). Of rows X that are fewer than their coordinates the eigenvectors
of X Xᵀ give all:  X Xᵀ U = U Λ  ->  C (Xᵀ U Λ^{−½}) = (Xᵀ U Λ^{−½}) Λ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layers import Contribution, Outer
from .projection import Shape, densify
from .sides import signed

WIDER = 3  # sides, as a multiple of the rank; twice is 0.02 (GPT) to 0.05 (MLP) worse, for less than half the work
PRECISE = 512  # up to this width an eigenproblem is solved whole, in float64
LEADING = 2  # coordinates that are looked for in a wider one, as a multiple of those that rank × rank would give
NOISE = torch.finfo(torch.float32).eps  # of the largest eigenvalue: in sums of float32 what is below it may be rounding
SOUND = 1e-10  # of the largest eigenvalue: down to here products of rows in float64 give orthonormal eigenvectors
TURNS = 2  # products with C that turn random columns towards its leading eigenvectors


class Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of one parameter's rows, largest first."""

    values: Tensor  # (m,)
    vectors: Tensor  # (n, m)


def widened(shape: Shape) -> Shape:
    """The same parameter with wider sides."""
    if not shape.d_in:
        return shape
    return Shape(
        shape.d_out, shape.d_in, min(shape.d_out, WIDER * shape.r_out), min(shape.d_in, WIDER * shape.r_in)
    )  # fmt: skip


def spectrum(C: Tensor, most: int) -> Spectrum:
    """Of a symmetric matrix that has no negative eigenvalue but for rounding; of a wide one the leading `most` only."""
    if len(C) <= PRECISE or 2 * most >= len(C):
        values, vectors = torch.linalg.eigh(C.double() if len(C) <= PRECISE else C)
    else:
        Q = _leading(C, most)  # (n, m)
        values, inner = torch.linalg.eigh(Q.T @ (C @ Q))
        vectors = Q @ inner
    return Spectrum(values.flip(0).clamp_min(0).double(), signed(vectors.flip(1)))


def spectrum_of_rows(X: Tensor, most: int) -> Spectrum:
    """Of C = XᵀX for few rows X (N, n): the leading `most`, without what is zero; at least one."""
    wide = X.double()
    values, U = torch.linalg.eigh(wide @ wide.T)
    values, U = values.flip(0), U.flip(1)
    m = min(most, int((values > SOUND * values[:1].clamp_min(1e-300)).sum()))
    if not m:
        return Spectrum(values.new_zeros(1), torch.eye(X.shape[1], 1, dtype=X.dtype))
    vectors = wide.T @ (U[:, :m] * values[:m].rsqrt())  # (n, m)
    return Spectrum(values[:m], signed(vectors).to(X.dtype))


def _leading(C: Tensor, m: int) -> Tensor:
    """(n, m): orthonormal columns near the leading eigenvectors of C, the same at every call."""
    Q = torch.randn(len(C), m, generator=torch.Generator().manual_seed(0), dtype=C.dtype)
    for _ in range(TURNS):
        Q = torch.linalg.qr(C @ Q)[0]
    return Q


def allocated(values: Sequence[Tensor], budget: int) -> list[int]:
    """How many coordinates each parameter keeps: at least one, `budget` in all, the largest eigenvalues first."""
    sizes = [len(v) for v in values]
    if not len(sizes) <= budget <= sum(sizes):
        raise ValueError(f"{budget} coordinates cannot be shared out among {len(sizes)} parameters of sizes {sizes}")
    rest = torch.cat([v[1:] for v in values])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes) - 1)
    chosen = rest.argsort(descending=True, stable=True)[: budget - len(sizes)]
    return (1 + torch.bincount(owner[chosen], minlength=len(sizes))).tolist()


def sufficient(values: Sequence[Tensor], wanted: float, most: int) -> int:
    """The fewest coordinates, at least one of each parameter, that hold the energy `wanted`; at most `most`.

    Where the eigenvalues do not add up to it, all of them that are more than rounding.
    """
    first = torch.stack([v[0] for v in values])
    rest = torch.cat([v[1:] for v in values]).sort(descending=True).values
    held = torch.cat([first.sum()[None], first.sum() + rest.cumsum(0)])
    more = (held < wanted) if float(held[-1]) >= wanted else (rest > NOISE * first.max())
    return min(most, len(first) + int(more.sum()))


def energy(part: Contribution, shape: Shape) -> float:
    """Σ ‖G‖² of one call's gradients; for G = Σ_t δ_t a_tᵀ that is Σ_st ⟨δ_s, δ_t⟩ ⟨a_s, a_t⟩."""
    if not isinstance(part, Outer):
        return float(densify(part, shape).double().square().sum())
    left, right = part
    same = left @ left.mT if left.is_floating_point() else left[:, :, None] == left[:, None, :]  # (B, S, S)
    return float((same * (right @ right.mT)).double().sum())
