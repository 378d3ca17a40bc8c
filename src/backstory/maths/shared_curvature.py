r"""Curvature that the steps of a window share: made as few orthogonal rows, and taken column by column.

**The rows.** A sum of outer products H = Σ v vᵀ ≈ VᵀV, V of at most r rows. Rows are gathered; once there are 4 r of them, the r leading
directions of their own sum take their place:

    Σ v vᵀ = U Λ Uᵀ,      V ← Λ_r^½ U_rᵀ

Where r is at least the rank of H nothing is lost. What is left out is counted: tr H − tr VᵀV. The rows of V are orthogonal, so
(I + a V Vᵀ)⁻¹ is one division.

**The window** (fourth part of `blocked`). With A₀, C₀ at the end of the window, s₁, s₂ how S of a step is made of them, and m_j = S n_j what
clipping takes out of step j (see steps), passed through that step,

    A = a₁ A₀ + a₂ C₀ + X V        C and S the same, with Y V and Z V
    X = A₀ Vᵀ diag x₁ + C₀ Vᵀ diag x₂ + Σ_j m_j x_jᵀ

Orthogonal rows do not mix columns, so a step t changes numbers alone, each x, y, z and unit vector e (K, R):

    u = y − η a x
    z = (1−τ) u − η n x
    x ← (1−ηλ') x + λ z + c (s₁ e₁ + s₂ e₂ + z ‖v‖² − e_t dᵀ)/(1 + γα ‖v‖²)        d = ⟨v, ∇L⟩, where the step was clipped
    y ← μ u

Shapes:  p coordinates, R rows of V, K = 2 + the clipped steps, N gradient rows of all steps and one for each clipped step.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .low_rank import FIRST
from .steps import Contraction, Step, implicit, squares

GATHER = 4  # so many times r rows are gathered before they are reduced
MORE = 1.25  # rows of a sketch, as a multiple of those that are looked for
BUSY, SPARSE = (
    4,
    8,
)  # so many times the sketch, or one in so many coordinates, tell which rows lead: on a GPT as well as all
FEW = 4  # units of rounding: a direction with less than that part of the largest one's energy is nothing else
SMALL = 1 << 22  # numbers that are few enough to be worked on together
COORDINATES = 512  # that are looked at together in float64
SOLVE = 1e-6  # of the mean of a Gram matrix's diagonal, added to it


class Sketch:
    """The leading `rank` directions of a sum of outer products, row by row; `rank=None` keeps the sum itself."""

    def __init__(self, p: int, rank: int | None = None) -> None:
        self.rank = p if rank is None else min(rank, p)
        self._gathered: list[Tensor] = []
        self._V: Tensor | None = None  # V, until more comes
        self._count = 0
        self.total = 0.0  # tr H of all that was added

    def add(self, rows: Tensor) -> None:
        """Add Σ v vᵀ over `rows` (m, p)."""
        self._gathered.append(rows.clone())
        self._V = None
        self._count += len(rows)
        self.total += float(rows.double().square().sum())
        if self._count > GATHER * self.rank:
            self.rows()

    def rows(self) -> Tensor:
        """V (at most r, p), its rows orthogonal, the largest first."""
        if self._V is None:
            self._V = orthogonal(torch.cat(self._gathered), self.rank)
            self._gathered, self._count = [self._V], len(self._V)
        return self._V

    @property
    def retained(self) -> float:
        """tr VᵀV of `rows`."""
        return float(self.rows().double().square().sum())


def leading(pieces: Sequence[Tensor], sizes: Sequence[int], most: int) -> Tensor:
    """About the `most` leading directions of VᵀV over the rows of `pieces`, so many of each (N, p in all); exactly, and orthogonal, if they are few.

    The coordinates with most energy are enough to find which combinations of rows lead, and take less work than all. The combinations are
    orthonormal, what they make nearly orthogonal: `orthogonal` does the rest, where that is wanted. A piece is looked at three times, and
    may be made anew each time: all rows are never there together unless they are few.
    """
    q, p = round(MORE * most), pieces[0].shape[1]
    if sum(sizes) <= 2 * q and sum(sizes) * p <= SMALL:
        rows = pieces[0].new_empty(sum(sizes), p)
        for part, piece in zip(rows.split(list(sizes)), pieces, strict=True):
            part.copy_(piece)
        return orthogonal(rows, most)
    busy = _busiest(pieces, BUSY * q)
    some = torch.cat([piece[:, busy] for piece in pieces])
    U = _combinations(some, q, most).split(list(sizes))
    V: Tensor = U[0].T @ pieces[0]
    for i in range(1, len(pieces)):
        V.addmm_(U[i].T, pieces[i])
    return V


def _busiest(pieces: Sequence[Tensor], fewest: int) -> Tensor:
    """The coordinates with most energy, in order."""
    sizes: list[Tensor] = [torch.linalg.vector_norm(piece, dim=0) for piece in pieces]
    energy = torch.stack(sizes).square().sum(0)
    chosen = energy.topk(min(len(energy), max(fewest, len(energy) // SPARSE))).indices
    return chosen.sort().values


def _combinations(rows: Tensor, q: int, most: int) -> Tensor:
    """(N, most) orthonormal: near the leading left singular vectors of rows (N, n)."""
    Q = torch.linalg.qr(rows @ signed_sums(rows, q).T)[0]  # (N, q)
    inner = Q.T @ rows  # (q, n)
    values, U = torch.linalg.eigh((inner @ inner.T).double())
    rank = int((values > values[-1:] * FEW * torch.finfo(rows.dtype).eps).sum())
    out: Tensor = Q @ U.flip(1)[:, : min(rank, most)].to(Q)
    return out


def signed_sums(rows: Tensor, q: int) -> Tensor:
    """Rows (N, p) in q groups of about one size, those of a group added up with random signs: the same at every call."""
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(len(rows), generator=g)
    signs = torch.randint(0, 2, (len(rows), 1), generator=g).to(rows) * 2 - 1
    out = rows.new_zeros(q, rows.shape[1])
    for part in (rows * signs)[order].split(q):
        out[: len(part)] += part
    return out


def smallest(rows: Tensor, dots: Tensor) -> Tensor:
    """The smallest d (p,) with ⟨v, d⟩ = `dots` for the rows v (N, p)."""
    wide = rows.double()
    M = wide @ wide.T
    M.diagonal().add_(SOLVE * M.diagonal().mean() + torch.finfo(torch.float64).tiny)
    solution: Tensor = torch.cholesky_solve(dots.double()[:, None], torch.linalg.cholesky(M))
    return (wide.T @ solution)[:, 0].to(rows)


def dual(w: Tensor, G: Tensor, dot_g: Tensor, V: Tensor | None = None, dot_v: Tensor | None = None) -> Tensor:
    """The smallest d with ⟨v, d⟩ = ⟨v, ∇L⟩ for a clipped step's curvature rows, and for its gradient rows, whose sum J must shrink."""
    root = w.sqrt()
    rows, dots = root.to(G)[:, None] * G, root * dot_g
    if V is None or dot_v is None:
        return smallest(rows, dots)
    return smallest(torch.cat([V, rows]), torch.cat([dot_v.to(dots), dots]))


def orthogonal(rows: Tensor, most: int | None = None) -> Tensor:
    """Orthogonal rows with the same VᵀV, the largest first, or the `most` largest; those that are 0 but for rounding are left out.

    Products and eigenvalues are taken in float64, some coordinates at a time: what float32 would round away adds up over many rows.
    """
    wide = len(rows) <= rows.shape[1]
    parts = rows.split(COORDINATES, 1) if wide else rows.split(COORDINATES)
    products = (x @ x.T if wide else x.T @ x for x in map(Tensor.double, parts))
    values, U = torch.linalg.eigh(sum_of(products))
    values, U = values.flip(0).clamp_min(0), U.flip(1)
    rank = int((values > values[:1] * len(values) * torch.finfo(torch.float64).eps).sum())
    r = rank if most is None else min(rank, most)
    if not wide:
        tall: Tensor = U[:, :r].T * values[:r].sqrt()[:, None]
        return tall.to(rows)
    out = rows.new_empty(r, rows.shape[1])
    for made, part in zip(out.split(COORDINATES, 1), parts, strict=True):
        made.copy_(U[:, :r].T @ part.double())
    return out


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    """Their sum, one after the other."""
    out: Tensor = reduce(Tensor.add_, terms)
    return out


def orthogonal_again(rows: Tensor) -> Tensor:
    """`orthogonal` for rows that were so before they were rounded: products of unit rows lose nothing in the rows' own precision.

    VVᵀ = D (I + E) D with D the rows' norms: what E loses in a row is a part of this row, however small beside others.
    """
    norms = torch.linalg.vector_norm(rows, dim=1)
    unit = rows / torch.where(norms > 0, norms, 1.0)[:, None]
    near = (unit @ unit.T).double()
    if not bool((near.abs().sum(1) <= 1.5).all()):  # E is no small matrix: they were not orthogonal
        return orthogonal(rows)
    size = norms.double()
    values, U = torch.linalg.eigh(near * torch.outer(size, size))
    values, U = values.flip(0), U.flip(1)
    rank = int((values > values[:1] * len(values) * torch.finfo(torch.float64).eps).sum())
    out: Tensor = (U[:, :rank].T * size).to(rows) @ unit
    return out


class Columns(NamedTuple):
    """What the steps of a window need of Z, and X and Y before the first one."""

    z: Tensor  # (steps, 2, R) z₁ and z₂ of each
    L: Tensor  # (N, clipped) products of each row with z_j of its own step: 0 unless j is later
    x: Tensor  # (K, R)
    y: Tensor  # (K, R)


def columns(steps: Sequence[Step], effects: Tensor, in_V: Sequence[Tensor], contraction: Contraction) -> Columns:
    """The recursion, from the last step to the first; `effects` (steps, 2) are s₁ and s₂, `in_V` the rows of each step times Vᵀ."""
    q = squares(steps[0])
    clipped = [i for i, s in enumerate(steps) if s.clip < 1]
    x = y = q.new_zeros(FIRST + len(clipped), len(q))
    z_all, L = q.new_zeros(len(steps), FIRST, len(q)), []
    for i in reversed(range(len(steps))):
        step, k = steps[i], steps[i].coefficients
        u = y - x * (k.pace * k.a)
        z = u * (1 - k.tau) - x * (k.pace * k.n)
        z_all[i] = z[:FIRST]
        L.append(in_V[i] @ z[FIRST:].T)
        Sv = z * q  # (K, R) what S makes of the rows of V
        Sv[:FIRST] += effects[i, :, None].to(q)
        if step.clip < 1:
            assert step.dot_v is not None
            Sv[FIRST + clipped.index(i)] -= step.dot_v
            Sv *= step.clip
        alike = step._replace(V=q.sqrt()[:, None])  # rows of these norms, orthogonal too, of one number each
        x = x * (1 - k.rate * k.decay) + z * k.l2 + implicit(alike, contraction, Sv.T).T
        y = u * k.momentum
    return Columns(z_all, torch.cat(L[::-1]), x, y)
