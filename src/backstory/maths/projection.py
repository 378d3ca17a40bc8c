r"""The few coordinates in which rows are kept.

The gradient G of a matrix parameter (d_out × d_in) is kept as

    row = vec(Lᵀ G R),      and for G = Σ_t δ_t a_tᵀ:    Lᵀ G R = Σ_t (Lᵀδ_t)(Rᵀa_t)ᵀ

so the two factors shrink before they meet. A vector parameter has one side (d_out = its length, no R).
Positions may also be summed in groups, k = ⌈(t + 1) K / S⌉ − 1, giving K rows whose sum is the gradient's.
A side is `None` (identity), a matrix (d, r), or r chosen coordinates (integers).

    full     both sides the identity
    random   entries N(0, 1/r), so that E[P Pᵀ] = I and inner products are right on average;
             independent seeds for the two sides and for every parameter
    learned  top eigenvectors of Σ_z G Gᵀ and Σ_z Gᵀ G over the first steps (`sides`): orthonormal; a core may follow, the
             top eigenvectors of all rows vec(Lᵀ G R) in wider sides (`learning`)
    mask     r coordinates of each side, chosen by seed

Shapes:  d original, r kept, B samples, S positions.
"""

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Contribution, Dense, Outer, Sum

KINDS = ("learned", "random", "mask", "full")
Side = Tensor | None


class Basis(NamedTuple):
    """The two sides of one parameter's projection (`right` is unused for vectors), and what is kept of their product."""

    left: Side
    right: Side
    core: Tensor | None = None  # (r_out · r_in, kept)


class Shape(NamedTuple):
    """One parameter as a matrix (d_out × d_in), or a vector (d_in = 0), and the ranks kept of its sides."""

    d_out: int
    d_in: int
    r_out: int
    r_in: int
    kept: int = 0  # columns of the core, 0 where there is none

    @property
    def product(self) -> int:
        """Numbers in vec(Lᵀ G R)."""
        return self.r_out * (self.r_in if self.d_in else 1)

    @property
    def dims(self) -> int:
        """How many numbers a row has."""
        return self.kept or self.product


def shape_of(shape: torch.Size, rank: tuple[int, int] | None) -> Shape:
    """`rank` (out, in) applied to a parameter of this shape; None keeps all. Vectors keep 4 × as many."""
    if len(shape) < 2:
        d = max(1, shape.numel())
        return Shape(d, 0, d if rank is None else min(d, 4 * max(rank)), 0)
    d_out, d_in = shape[0], shape[1:].numel()
    r_out, r_in = rank or (d_out, d_in)
    return Shape(d_out, d_in, min(d_out, r_out), min(d_in, r_in))


def random_matrix(d: int, r: int, *, seed: int, name: str) -> Tensor:
    """The (d, r) projection called `name`: the same on every machine, in any order of asking."""
    return torch.randn(d, r, generator=_generator(seed, name, d, r), dtype=torch.float32) / math.sqrt(r)


def random_basis(shape: Shape, *, seed: int, name: str) -> Basis:
    """Seeded Gaussian sides; a side that keeps everything is the identity."""

    def side(which: str, d: int, r: int) -> Side:
        return None if r >= d else random_matrix(d, r, seed=seed, name=f"{name}/{which}")

    return Basis(side("left", shape.d_out, shape.r_out), side("right", shape.d_in, shape.r_in))


def mask_basis(shape: Shape, *, seed: int, name: str) -> Basis:
    """Seeded choice of coordinates on each side."""

    def side(which: str, d: int, r: int) -> Side:
        if r >= d:
            return None
        return torch.randperm(d, generator=_generator(seed, f"{name}/{which}", d, r))[:r].sort().values

    return Basis(side("left", shape.d_out, shape.r_out), side("right", shape.d_in, shape.r_in))


def merge(parts: Sequence[Contribution], shape: Shape) -> Contribution:
    """All calls of one parameter in one batch as one: a sample's calls add up before anything is squared."""
    if len(parts) == 1:
        return parts[0]
    outers = [x for x in parts if isinstance(x, Outer)]
    sums = [x for x in parts if isinstance(x, Sum)]
    if len(sums) == len(parts):
        return Sum(torch.cat([x.values for x in sums], 1))
    if len(outers) < len(parts):
        return Dense(torch.stack([densify(x, shape) for x in parts]).sum(0))
    lefts = [x.left for x in outers]
    if len({x.is_floating_point() for x in lefts}) > 1:
        lefts = [dense_left(x, shape.d_out, outers[0].right.dtype) for x in lefts]
    return Outer(torch.cat(lefts, 1), torch.cat([x.right for x in outers], 1))


def densify(part: Contribution, shape: Shape) -> Tensor:
    """Gradients written out, (B, d_out, d_in), or (B, d_out) for a vector."""
    if isinstance(part, Outer):
        return torch.bmm(dense_left(part.left, shape.d_out, part.right.dtype).mT, part.right)
    if isinstance(part, Sum):
        return part.values.sum(1)
    return part.grads.reshape(len(part.grads), *((shape.d_out, shape.d_in) if shape.d_in else (shape.d_out,)))


def compact(part: Contribution, shape: Shape) -> Contribution:
    """The smaller of factors, S (d_out + d_in) numbers, and the gradient itself, d_out · d_in."""
    if not isinstance(part, Outer):
        return Dense(densify(part, shape)) if isinstance(part, Sum) else part
    width = part.left.shape[2] if part.left.is_floating_point() else 1
    return (
        Dense(densify(part, shape)) if part.right.shape[1] * (width + shape.d_in) > shape.d_out * shape.d_in else part
    )


def project(contribution: Contribution, shape: Shape, basis: Basis) -> Tensor:
    """One call's gradients in the projection: (B, dims)."""
    if not isinstance(contribution, Outer):
        return project_dense(densify(contribution, shape), shape, basis)
    left = _index_side(contribution.left, basis.left, shape.d_out, contribution.right.dtype)
    right = apply(contribution.right, basis.right)  # (B, S, r_in)
    if left.shape[1] == 1:
        return apply((left.mT * right).flatten(1), basis.core)
    return apply(torch.bmm(left.mT, right).flatten(1), basis.core)


def project_groups(part: Contribution, shape: Shape, basis: Basis, groups: int) -> Tensor:
    """The same for each group of positions: (B, K, dims); what has no positions belongs to the last group."""
    if groups == 1:
        return project(part, shape, basis)[:, None]
    if isinstance(part, Outer):
        left = _index_side(part.left, basis.left, shape.d_out, part.right.dtype)  # (B, S, r_out)
        right = apply(part.right, basis.right)  # (B, S, r_in)
        return apply(_meet(left, right, groups).flatten(2), basis.core)
    if isinstance(part, Sum):
        sums = group_sums(part.values, groups)  # (B, K, d)
        return project_dense(sums.flatten(0, 1), shape, basis).reshape(len(sums), groups, -1)
    rows = project_dense(part.grads, shape, basis)
    out = rows.new_zeros(len(rows), groups, rows.shape[1])
    out[:, -1] = rows
    return out


def split_groups(part: Contribution, groups: int) -> list[Contribution | None]:
    """A call's contribution to each group; None where it has none."""
    if isinstance(part, Dense) or groups == 1:
        return [*[None] * (groups - 1), part]
    edges = group_edges((part.right if isinstance(part, Outer) else part.values).shape[1], groups)
    return [None if lo == hi else type(part)(*(x[:, lo:hi] for x in part)) for lo, hi in edges]


def products(part: Contribution, whole: Tensor, shape: Shape, groups: int) -> Tensor:
    """⟨h_k, whole⟩ of each sample and group, (B, K), in the parameter's own coordinates."""
    if isinstance(part, Dense):
        dots = part.grads.flatten(1) @ whole.flatten()
        return F.pad(dots[:, None], (groups - 1, 0))
    if isinstance(part, Sum):
        return group_sums(part.values @ whole.flatten(), groups)
    W = whole.reshape(shape.d_out, shape.d_in)
    seen = part.left @ W if part.left.is_floating_point() else W[part.left]  # (B, S, d_in)
    return group_sums((seen * part.right).sum(2), groups)


def group_edges(positions: int, groups: int) -> list[tuple[int, int]]:
    """From where to where each group of positions goes."""
    ends = [k * positions // groups for k in range(groups + 1)]
    return list(pairwise(ends))


def group_sums(x: Tensor, groups: int) -> Tensor:
    """(B, S, …) -> (B, K, …)."""
    S = x.shape[1]
    if S % groups == 0:
        return x.reshape(len(x), groups, -1, *x.shape[2:]).sum(2)
    which = torch.zeros(groups, S, dtype=x.dtype, device=x.device)
    for k, (lo, hi) in enumerate(group_edges(S, groups)):
        which[k, lo:hi] = 1
    sums: Tensor = (which @ x.reshape(len(x), S, -1)).reshape(len(x), groups, *x.shape[2:])
    return sums


def _meet(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Σ_t l_t r_tᵀ over each group's positions: (B, K, r_out, r_in)."""
    together = right.new_empty(len(left), groups, left.shape[2], right.shape[2])
    for k, (lo, hi) in enumerate(group_edges(left.shape[1], groups)):
        torch.bmm(left[:, lo:hi].mT, right[:, lo:hi], out=together[:, k])
    return together


def project_dense(grads: Tensor, shape: Shape, basis: Basis) -> Tensor:
    """(B, *parameter.shape) -> (B, dims): vec(Lᵀ G R), and the core's part of it."""
    G = grads.reshape(len(grads), shape.d_out, max(1, shape.d_in))  # (B, d_out, d_in)
    G = apply(G, basis.right) if shape.d_in else G
    return apply(apply(G.mT, basis.left).mT.reshape(len(grads), -1), basis.core)


def apply(x: Tensor, side: Side) -> Tensor:
    """(…, d) -> (…, r)."""
    if side is None:
        return x
    return x @ side.to(x.dtype) if side.is_floating_point() else x[..., side]


def _index_side(left: Tensor, side: Side, d: int, dtype: torch.dtype) -> Tensor:
    if left.is_floating_point():
        return apply(left, side)
    if side is not None and side.is_floating_point():
        return side[left].to(dtype)  # a projected one-hot row is a row of the projection
    return apply(dense_left(left, d, dtype), side)


def dense_left(left: Tensor, d: int, dtype: torch.dtype) -> Tensor:
    """Factors (B, S, d), one-hot where they are indices (B, S)."""
    return left if left.is_floating_point() else F.one_hot(left, d).to(dtype)


def _generator(seed: int, name: str, d: int, r: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{d}x{r}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
