r"""A subspace learned from rows: sides first, then the best core inside their product, the same budget for all blocks.

The sides L, R of each parameter are the top eigenvectors of the rows' second moments, three times as wide as the rank that
was asked for. Inside vec(Lᵀ G R) the rows need fewer coordinates than the product has: with C = Σ κ x xᵀ over the rows x of
the warm-up, the core is the top eigenvectors of C. How many each parameter gets is decided by the eigenvalues of all
parameters together, so that the run as a whole has as many coordinates as rank × rank in each would give.

Of a C more than twice as wide as what is looked for only the leading part is computed: a block of seeded random columns, turned towards it by repeated products
with C, then the eigenvectors of C inside it (subspace iteration with a Rayleigh-Ritz step).

Knows nothing of models or files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .subspace import Shape

WIDER = 3  # sides, as a multiple of the rank; twice is 0.02 (GPT) to 0.05 (MLP) worse, for less than half the work
PRECISE = 512  # up to this width an eigenproblem is solved whole, in float64
LEADING = 2  # coordinates that are looked for in a wider one, as a multiple of those that rank × rank would give
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
    vectors = vectors.flip(1)
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    return Spectrum(values.flip(0).clamp_min(0).double(), vectors * signs)


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
