r"""A sum of outer products in few rows: H = Σ v vᵀ ≈ VᵀV, V of at most r rows.

Rows are gathered; once there are 4 r of them, the r leading directions of their own sum stay in their place:

    Σ v vᵀ = U Λ Uᵀ,      V ← Λ_r^½ U_rᵀ

Where r is at least the rank of H nothing is lost, and V is the sum itself. What is left out is counted: tr H − tr VᵀV.
The rows of V are orthogonal, so (I + a V Vᵀ)⁻¹ is one division.

Shapes:  m rows at a time, r rows kept, p coordinates.
"""

import torch
from torch import Tensor

GATHER = 4  # so many times r rows are gathered before they are reduced


class Sketch:
    """The leading `rank` directions of a sum of outer products, row by row; `rank=None` keeps the sum itself."""

    def __init__(self, p: int, rank: int | None = None) -> None:
        self.rank = p if rank is None else min(rank, p)
        self._held: list[Tensor] = []
        self._found: Tensor | None = None  # V, until more comes
        self._count = 0
        self.total = 0.0  # tr H of all that was added

    def add(self, rows: Tensor) -> None:
        """Add Σ v vᵀ over `rows` (m, p)."""
        self._held.append(rows.clone())
        self._found = None
        self._count += len(rows)
        self.total += float(rows.double().square().sum())
        if self._count > GATHER * self.rank:
            self.rows()

    def rows(self) -> Tensor:
        """V (at most r, p), its rows orthogonal, the largest first."""
        if self._found is None:
            self._found = orthogonal(torch.cat(self._held), self.rank)
            self._held, self._count = [self._found], len(self._found)
        return self._found

    @property
    def kept(self) -> float:
        """tr VᵀV of `rows`."""
        return float(self.rows().double().square().sum())


def orthogonal(rows: Tensor, most: int | None = None) -> Tensor:
    """Orthogonal rows with the same VᵀV, the largest first, or the `most` largest; those that are 0 but for rounding are left out.

    The eigenvalues are found in float64: those that float32 would round away add up over many rows.
    """
    wide, V = len(rows) <= rows.shape[1], rows.double()
    values, U = torch.linalg.eigh(V @ V.T if wide else V.T @ V)
    values, U = values.flip(0).clamp_min(0), U.flip(1)
    rank = int((values > values[:1] * len(values) * torch.finfo(torch.float64).eps).sum())
    kept = rank if most is None else min(rank, most)
    leading = U[:, :kept].T
    found: Tensor = leading @ V if wide else leading * values[:kept].sqrt()[:, None]
    return found.to(rows)
