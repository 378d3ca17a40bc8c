r"""The sides of a learned projection: top eigenvectors of the second moments of a parameter's rows.

    M_left = Σ_z G Gᵀ,   M_right = Σ_z Gᵀ G,      and for G = Δᵀ A (factors of S positions):  G Gᵀ = Δᵀ (A Aᵀ) Δ

so the S × S product in the middle replaces G. A long side (a vocabulary) never gets its d × d moment: with a seeded Ω (d, q)
only Y = M Ω is summed, and the eigenvectors are those of Nyström's M ≈ Y (Ωᵀ Y)⁻¹ Yᵀ.

Shapes:  d the side's own length, r kept of it, q = 2 r, B samples, S positions.
"""

import torch
from torch import Tensor

from .layers import Contribution, Outer
from .projection import Basis, Shape, dense_left, densify, random_basis, random_matrix

LONG = 1024  # a longer side is given a sketch of its moment
Pair = tuple[Tensor | None, Tensor | None]  # of the left and the right side
NO_PROBES: Pair = (None, None)


def probes(shape: Shape, *, seed: int, name: str) -> Pair:
    """Ω for each side that is too long for a moment of its own, else None."""

    def probe(which: str, d: int, r: int) -> Tensor | None:
        return random_matrix(d, 2 * r, seed=seed, name=f"{name}/{which}/probe") if d > max(LONG, 2 * r) else None

    return probe("left", shape.d_out, shape.r_out), probe("right", shape.d_in, shape.r_in)


def moments(contribution: Contribution, shape: Shape, omegas: Pair = NO_PROBES) -> Pair:
    """`(M_left, M_right)` of one call, or M Ω where a probe is given; None for a side that keeps everything."""
    wanted = (shape.r_out < shape.d_out, shape.r_in < shape.d_in)
    if not isinstance(contribution, Outer):
        G = densify(contribution, shape).reshape(-1, shape.d_out, max(1, shape.d_in))
        sides = G.transpose(0, 1).flatten(1), G.flatten(0, 1).T  # (d, everything else)
        left, right = (_dense(x, o) if w else None for x, o, w in zip(sides, omegas, wanted, strict=True))
        return left, right
    delta, a = contribution
    left = _factors(delta, a @ a.mT, omegas[0], shape.d_out) if wanted[0] else None
    return left, _factors(a, _products(delta).to(a.dtype), omegas[1], shape.d_in) if wanted[1] else None


def _dense(x: Tensor, omega: Tensor | None) -> Tensor:
    """x xᵀ, or x xᵀ Ω."""
    return x @ x.T if omega is None else x @ (x.T @ omega.to(x))


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
    found = torch.linalg.eigh(moment.double())[1].flip(1) if omega is None else _nystrom(moment, omega)
    return signed(found[:, :r]).to(moment.dtype).contiguous()


def signed(vectors: Tensor) -> Tensor:
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
