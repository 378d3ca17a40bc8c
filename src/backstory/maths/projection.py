r"""The projection of per-sample gradients to a few coordinates, and how it is learned.

The gradient G of a matrix parameter (d_out × d_in) is kept as

    row = vec(Lᵀ G R),      and for G = Σ_t δ_t a_tᵀ:    Lᵀ G R = Σ_t (Lᵀδ_t)(Rᵀa_t)ᵀ

so the two factors shrink before they meet. For a convolution the rows Rᵀa_t are the outputs of a convolution with r filters, the
columns of R, of the same inputs: patches are never written out. A vector parameter has one side (d_out = its length, no R).
Positions may also be summed in groups, k = ⌈(t + 1) K / S⌉ − 1, giving K rows whose sum is the gradient's.
A side is `None` (identity), a matrix (d, r), or r chosen coordinates (integers).

    full     both sides the identity
    random   entries N(0, 1/r), so that E[P Pᵀ] = I and inner products are right on average;
             independent seeds for the two sides and for every parameter
    learned  top eigenvectors of Σ_z G Gᵀ and Σ_z Gᵀ G over the first steps: orthonormal; then a core, the
             coordinates of vec(Lᵀ G R) that hold most energy
    mask     r coordinates of each side, chosen by seed

**Learned sides.**  M_left = Σ_z G Gᵀ,  M_right = Σ_z Gᵀ G,  and for G = Δᵀ A (factors of S positions)  G Gᵀ = Δᵀ (A Aᵀ) Δ,  so the
S × S product in the middle replaces G. A long side (a vocabulary) never gets its d × d moment: with a seeded Ω (d, q) only Y = M Ω
is summed, and the eigenvectors are those of Nyström's M ≈ Y (Ωᵀ Y)⁻¹ Yᵀ.

**The core.** Sides are half as wide again as the rank (three times as wide where a share of the energy decides), and turned into their eigenvectors even where they keep everything: the energy
then lies in few coordinates of vec(Lᵀ G R), and the core is a choice of them. Choosing is as good as the leading eigenvectors of the rows
in wider sides (0.85 and 0.85 for a fine-tuned GPT), for a thirtieth of the work. How many each
parameter gets is decided by the energies ε = Σ κ x² of all parameters together, largest first, so that the run as a whole has as many
coordinates as rank × rank in each would give, or the fewest that hold a share S of the rows' energy:

    Σ_i Σ_{k ≤ n_i} ε_ik  ≥  S E,      E = Σ κ ‖G‖² of all parameters, before any side,      n_i ≥ 1,  Σ n_i smallest

Shapes:  d original, r kept of a side, q = 2 r, B samples, S positions.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Contribution, Dense, Outer, Patches, Plain, Sum, count_positions, written_out

KINDS = ("learned", "random", "mask", "full")
LONG = 256  # a longer side is given a sketch of its moment
WIDER = 1.5  # sides, as a multiple of the rank: twice as wide gives nothing more
WIDEST = 3  # the same where a share of the energy decides how many coordinates there are: sides then lose less of it
NOISE = torch.finfo(torch.float32).eps  # of the largest energy: in sums of float32 what is below it may be rounding
Side = Tensor | None
Pair = tuple[Tensor | None, Tensor | None]  # of the left and the right side
NO_PROBES: Pair = (None, None)


class Basis(NamedTuple):
    """The two sides of one parameter's projection (`right` is unused for vectors), and what is kept of their product."""

    left: Side
    right: Side
    core: Side = None  # (kept,) coordinates of vec(Lᵀ G R)


class Shape(NamedTuple):
    """One parameter as a matrix (d_out × d_in), or a vector (d_in = 0), and the ranks kept of its sides."""

    d_out: int
    d_in: int
    r_out: int
    r_in: int
    core: int = 0  # coordinates that the core chooses, 0 where there is none

    @property
    def product(self) -> int:
        """Numbers in vec(Lᵀ G R)."""
        return self.r_out * (self.r_in if self.d_in else 1)

    @property
    def dims(self) -> int:
        """How many numbers a row has."""
        return self.core or self.product


def shape_of(shape: torch.Size, rank: tuple[int, int] | None) -> Shape:
    """`rank` (out, in) applied to a parameter of this shape; None keeps all. Vectors keep 4 × as many."""
    if len(shape) < 2:
        d = max(1, shape.numel())
        return Shape(d, 0, d if rank is None else min(d, 4 * max(rank)), 0)
    d_out, d_in = shape[0], shape[1:].numel()
    r_out, r_in = rank or (d_out, d_in)
    return Shape(d_out, d_in, min(d_out, r_out), min(d_in, r_in))


def random_matrix(d: int, r: int, *, seed: int, name: str) -> Tensor:
    """The (d, r) projection called `name`: the same on every machine, in any order of calls."""
    return torch.randn(d, r, generator=_generator(seed, name, d, r), dtype=torch.float32) / math.sqrt(r)


def random_basis(shape: Shape, *, seed: int, name: str) -> Basis:
    """Seeded Gaussian sides."""
    return _basis(shape, lambda side, d, r: random_matrix(d, r, seed=seed, name=f"{name}/{side}"))


def mask_basis(shape: Shape, *, seed: int, name: str) -> Basis:
    """Seeded choice of coordinates on each side."""
    return _basis(
        shape,
        lambda side, d, r: torch.randperm(d, generator=_generator(seed, f"{name}/{side}", d, r))[:r].sort().values,
    )


def _basis(shape: Shape, side: Callable[[str, int, int], Tensor]) -> Basis:
    """`side(name, d, r)` for both sides; one that keeps everything is the identity."""
    both = ("left", shape.d_out, shape.r_out), ("right", shape.d_in, shape.r_in)
    return Basis(*(None if r >= d else side(name, d, r) for name, d, r in both))


def merge(parts: Sequence[Contribution], shape: Shape) -> Contribution:
    """All calls of one parameter in one batch as one: a sample's calls add up before anything is squared."""
    if len(parts) == 1:
        return parts[0]
    plain = list(map(written_out, parts))
    outers = [x for x in plain if isinstance(x, Outer)]
    sums = [x for x in plain if isinstance(x, Sum)]
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
    grads = part.dense() if isinstance(part, Patches) else part.grads
    return grads.reshape(len(grads), *((shape.d_out, shape.d_in) if shape.d_in else (shape.d_out,)))


def compact(part: Contribution, shape: Shape) -> Plain:
    """The smaller of factors, S (d_out + d_in) numbers, and the gradient itself, d_out · d_in."""
    if isinstance(part, Sum):
        return Dense(densify(part, shape))
    if isinstance(part, Dense):
        return part
    width = shape.d_out if isinstance(part, Patches) or part.left.is_floating_point() else 1
    smaller = count_positions(part) * (width + shape.d_in) <= shape.d_out * shape.d_in
    return written_out(part) if smaller else Dense(densify(part, shape))


def project(contribution: Contribution, shape: Shape, basis: Basis) -> Tensor:
    """One call's gradients in the projection: (B, dims)."""
    if isinstance(contribution, Patches) and not _shrinks(contribution, shape, basis):
        contribution = compact(contribution, shape)
    if not isinstance(contribution, Outer | Patches):
        return project_dense(densify(contribution, shape), shape, basis)
    right = _project_right(contribution, basis)  # (B, S, r_in)
    if isinstance(contribution, Patches) and _meets_first(contribution, shape, basis):
        G = torch.bmm(contribution.left.flatten(2), right)  # (B, d_out, r_in)
        return apply(apply(G.mT, basis.left).mT.flatten(1), basis.core)
    left = _project_left(contribution, shape, basis, right.dtype)  # (B, S, r_out)
    if left.shape[1] == 1:
        return apply((left.mT * right).flatten(1), basis.core)
    return apply(torch.bmm(left.mT, right).flatten(1), basis.core)


def _project_right(part: Outer | Patches, basis: Basis) -> Tensor:
    if isinstance(part, Outer):
        return apply(part.right, basis.right)
    assert basis.right is not None
    filters = basis.right.to(part.inputs.dtype).T.reshape(-1, part.inputs.shape[1], *part.window.kernel)
    return part.window.convolve(part.inputs, filters).flatten(2).mT


def _project_left(part: Outer | Patches, shape: Shape, basis: Basis, dtype: torch.dtype) -> Tensor:
    if isinstance(part, Outer):
        return _index_side(part.left, basis.left, shape.d_out, dtype)
    left, side = part.left.flatten(2), basis.left  # (B, d_out, S): its products need no copy
    if side is not None and side.is_floating_point():
        return (side.to(left.dtype).T @ left).mT
    return apply(left.mT, side)


def _meets_first(part: Patches, shape: Shape, basis: Basis) -> bool:
    """Whether it takes less work to let a wide left side meet the right one, and to shrink it then."""
    S, (d_out, _, r_out, r_in, _) = count_positions(part), shape
    first, last = S * d_out * r_in + d_out * r_out * r_in, S * r_out * (d_out + r_in)
    return basis.left is None or first < last


def _shrinks(part: Patches, shape: Shape, basis: Basis) -> bool:
    """Whether it takes less work to shrink both sides before they meet than to write the gradients out."""
    if basis.right is None or not basis.right.is_floating_point():
        return False
    S, (d_out, d_in, r_out, r_in, _) = count_positions(part), shape
    return S * (d_in * r_in + d_out * r_out + r_out * r_in) < d_in * d_out * (S + r_in) + d_out * r_in * r_out


def project_groups(part: Contribution, shape: Shape, basis: Basis, groups: int) -> Tensor:
    """The same for each group of positions: (B, K, dims); what has no positions belongs to the last group."""
    if groups == 1:
        return project(part, shape, basis)[:, None]
    part = written_out(part)
    if isinstance(part, Outer):
        left = _index_side(part.left, basis.left, shape.d_out, part.right.dtype)  # (B, S, r_out)
        right = apply(part.right, basis.right)  # (B, S, r_in)
        meet = right.new_empty(len(left), groups, left.shape[2], right.shape[2])  # Σ_t l_t r_tᵀ of each group
        for k, (lo, hi) in enumerate(group_edges(left.shape[1], groups)):
            torch.bmm(left[:, lo:hi].mT, right[:, lo:hi], out=meet[:, k])
        return apply(meet.flatten(2), basis.core)
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
    apart = part.outer() if isinstance(part, Patches) else part
    edges = group_edges((apart.right if isinstance(apart, Outer) else apart.values).shape[1], groups)
    return [None if lo == hi else type(apart)(*(x[:, lo:hi] for x in apart)) for lo, hi in edges]


def products(part: Contribution, whole: Tensor, shape: Shape, groups: int) -> Tensor:
    """⟨h_k, whole⟩ of each sample and group, (B, K), in the parameter's own coordinates."""
    part = Dense(part.dense()) if isinstance(part, Patches) and groups == 1 else written_out(part)
    if isinstance(part, Dense):
        dots = part.grads.flatten(1) @ whole.flatten()
        return F.pad(dots[:, None], (groups - 1, 0))
    if isinstance(part, Sum):
        return group_sums(part.values @ whole.flatten(), groups)
    W = whole.reshape(shape.d_out, shape.d_in)
    lW = part.left @ W if part.left.is_floating_point() else W[part.left]  # (B, S, d_in)
    return group_sums((lW * part.right).sum(2), groups)


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


def project_dense(grads: Tensor, shape: Shape, basis: Basis) -> Tensor:
    """(B, *parameter.shape) -> (B, dims): vec(Lᵀ G R), and the core's part of it."""
    G = grads.reshape(len(grads), shape.d_out, max(1, shape.d_in))  # (B, d_out, d_in)
    G = apply(G, basis.right) if shape.d_in else G
    return apply(apply(G.mT, basis.left).mT.reshape(len(grads), -1), basis.core)


def apply(x: Tensor, side: Side) -> Tensor:
    """(…, d) -> (…, r)."""
    if side is None:
        return x
    if side.is_floating_point():
        return x @ side.to(x.dtype)
    chosen = x.reshape(-1, x.shape[-1]).index_select(1, side)  # several times as fast as x[..., side]
    return chosen.reshape(*x.shape[:-1], len(side))


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


def probes(shape: Shape, *, seed: int, name: str) -> Pair:
    """Ω for each side that is too long for a moment of its own, else None."""

    def probe(which: str, d: int, r: int) -> Tensor | None:
        return random_matrix(d, 2 * r, seed=seed, name=f"{name}/{which}/probe") if d > max(LONG, 2 * r) else None

    return probe("left", shape.d_out, shape.r_out), probe("right", shape.d_in, shape.r_in)


def moments(contribution: Contribution, shape: Shape, omegas: Pair = NO_PROBES, *, turned: bool = False) -> Pair:
    """`(M_left, M_right)` of one call, or M Ω where a probe is given; None for a side that keeps everything, unless it is `turned`."""
    wanted = (turned or shape.r_out < shape.d_out, shape.d_in > 0 and (turned or shape.r_in < shape.d_in))
    contribution = written_out(contribution)
    if not isinstance(contribution, Outer):
        G = densify(contribution, shape).reshape(-1, shape.d_out, max(1, shape.d_in))
        sides = G.transpose(0, 1).flatten(1), G.flatten(0, 1).T  # (d, everything else)
        each = zip(sides, omegas, wanted, strict=True)
        left, right = (x @ (x.T if o is None else x.T @ o.to(x)) if w else None for x, o, w in each)
        return left, right
    delta, a = contribution
    left = _factors(delta, a @ a.mT, omegas[0], shape.d_out) if wanted[0] else None
    return left, _factors(a, _products(delta).to(a.dtype), omegas[1], shape.d_in) if wanted[1] else None


def _factors(x: Tensor, between: Tensor, omega: Tensor | None, d: int) -> Tensor:
    """Σ_z xᵀ T x of one side's factors x (B, S, d), or their indices (B, S), and T (B, S, S); times Ω where given."""
    if omega is None:
        x = dense_left(x, d, between.dtype)
        return x.flatten(0, 1).T @ (between @ x).flatten(0, 1)
    omega = omega.to(between)
    if x.is_floating_point():
        return x.flatten(0, 1).T @ (between @ (x @ omega)).flatten(0, 1)
    return torch.zeros_like(omega).index_add_(0, x.flatten(), (between @ omega[x]).flatten(0, 1))


def _products(left: Tensor) -> Tensor:
    """⟨δ_s, δ_t⟩ for all pairs of positions; one-hot rows agree or they do not."""
    return left @ left.mT if left.is_floating_point() else left[:, :, None] == left[:, None, :]


def learned_basis(
    left: Tensor | None, right: Tensor | None, shape: Shape, omegas: Pair = NO_PROBES, *, seed: int, name: str
) -> Basis:
    """Top eigenvectors of the two moments; a side that no row has reached gets seeded coordinates."""
    spare = random_basis(shape, seed=seed, name=name)
    return Basis(
        spare.left if left is None else _top(left, omegas[0], shape.r_out),
        spare.right if right is None else _top(right, omegas[1], shape.r_in),
    )


def _top(moment: Tensor, omega: Tensor | None, r: int) -> Tensor:
    """(d, r), largest first."""
    vectors = torch.linalg.eigh(moment.double())[1].flip(1) if omega is None else _nystrom(moment, omega)
    return fix_signs(vectors[:, :r]).to(moment.dtype).contiguous()


def fix_signs(vectors: Tensor) -> Tensor:
    """Eigenvectors (d, r) with a sign that rounding does not decide: all on one side of a plane without symmetry.

    The sign of the largest entry would not do. Where two classes are learned, an eigenvector is (1, −1)/√2.
    """
    normal = torch.arange(1, len(vectors) + 1).to(vectors).sqrt().cos()  # (d,)
    return torch.where(normal @ vectors < 0, -vectors, vectors)


def _nystrom(Y: Tensor, omega: Tensor) -> Tensor:
    """(d, q): orthonormal, the leading eigenvectors of M ≈ Y (Ωᵀ Y)⁻¹ Yᵀ first.

    A shift above the rounding of Y keeps Ωᵀ Y positive where M has a lower rank than q.
    """
    shift = 8 * torch.finfo(Y.dtype).eps
    Y, omega = Y.double(), omega.double()
    Y = Y + omega * (shift * Y.norm() / omega.norm()).clamp_min(1e-300)
    inner = omega.T @ Y
    L = torch.linalg.cholesky((inner + inner.T) / 2)
    U: Tensor = torch.linalg.svd(torch.linalg.solve_triangular(L, Y.T, upper=False).T, full_matrices=False)[0]
    return U


def widen(shape: Shape, times: float = WIDER) -> Shape:
    """The same parameter with wider sides, and no core."""
    if not shape.d_in:
        return shape._replace(core=0)
    r_out, r_in = (math.ceil(times * r) for r in (shape.r_out, shape.r_in))
    return shape._replace(r_out=min(shape.d_out, r_out), r_in=min(shape.d_in, r_in), core=0)


def narrow(shapes: Sequence[Shape], most: int) -> list[Shape]:
    """Shapes with cores, in proportion to what they keep, so that there are `most` coordinates in all, and one of each at least.

    As they are where these suffice.
    """
    dims, most = [shape.dims for shape in shapes], max(most, len(shapes))
    if sum(dims) <= most:
        return list(shapes)
    kept = [1 + (most - len(dims)) * (d - 1) // (sum(dims) - len(dims)) for d in dims]
    for b in sorted(range(len(dims)), key=lambda b: kept[b] - dims[b])[: most - sum(kept)]:
        kept[b] += 1
    return [shape._replace(core=n) for shape, n in zip(shapes, kept, strict=True)]


def allocate(values: Sequence[Tensor], budget: int) -> list[int]:
    """How many coordinates each parameter keeps: at least one, `budget` in all, the largest `values` first (each sorted so)."""
    sizes = [len(v) for v in values]
    if not len(sizes) <= budget <= sum(sizes):
        raise ValueError(
            f"budget must be between {len(sizes)} (one per parameter) and {sum(sizes)} coordinates, got {budget} for sizes {sizes}"
        )
    rest = torch.cat([v[1:] for v in values])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes) - 1)
    chosen = rest.argsort(descending=True, stable=True)[: budget - len(sizes)]
    return (1 + torch.bincount(owner[chosen], minlength=len(sizes))).tolist()


def count_sufficient(values: Sequence[Tensor], wanted: float, most: int) -> int:
    """The fewest coordinates, at least one of each parameter, that hold the energy `wanted`; at most `most`.

    Where the values do not add up to it, all of them that are more than rounding.
    """
    first = torch.stack([v[0] for v in values])
    rest = torch.cat([v[1:] for v in values]).sort(descending=True).values
    energies = torch.cat([first.sum()[None], first.sum() + rest.cumsum(0)])
    more = (energies < wanted) if float(energies[-1]) >= wanted else (rest > NOISE * first.max())
    return min(most, len(first) + int(more.sum()))


def energy(part: Contribution, shape: Shape) -> float:
    """Σ ‖G‖² of one call's gradients; for G = Σ_t δ_t a_tᵀ that is Σ_st ⟨δ_s, δ_t⟩ ⟨a_s, a_t⟩."""
    if not isinstance(part, Outer):  # patches: their gradients are fewer numbers than products of positions
        return float(densify(part, shape).double().square().sum())
    left, right = part
    return float((_products(left) * (right @ right.mT)).double().sum())
