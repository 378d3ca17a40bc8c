r"""Adam in a projection: rows in coordinates in which its diagonal P = 1/(√v̂ + ε) is 1.

A diagonal does not commute with a projection. So P is factored for each weight matrix, as Adafactor factors v: with
u = (√v̂ + ε)², r and c the sums of its rows and columns,

    P ≈ (Σr)^½ r^{−½} ⊗ c^{−½}          exact for a v of rank one; vectors keep their exact diagonal
    ĝ = P^½ g = (Σr)^¼ (r^{−¼} ∘ δ) ⊗ (c^{−¼} ∘ a)        still an outer product

Rows ĝ and queries P^½ v are then those of a run with P = 1, exactly for a P that does not change; its drift from step
to step is dropped. A row or column that never had a gradient (an unseen token) has v = 0, and gives 0.

Shapes:  d_out × d_in a parameter as a matrix, B samples, S positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layers import Contribution, Dense, Outer, Plain, Sum, written_out
from .projection import Basis, Shape, Side, project_dense

PIECE = 1 << 16  # numbers that are looked at together on a CPU


class Scale(NamedTuple):
    """P^½ of one parameter as left ⊗ right; `right` is None for vectors."""

    left: Tensor  # (d_out,)
    right: Tensor | None  # (d_in,)


def factor_scale(v: Tensor, eps: float, shape: Shape, correction: float = 1.0) -> Scale:
    """P^½ from v̂ = v / `correction` and ε, in at least float32."""
    v = v.to(torch.promote_types(v.dtype, torch.float32))
    if not shape.d_in:
        v_hat = v.flatten() / correction
        return Scale(_power(v_hat.sqrt() + eps, v_hat, -0.5), None)
    (rows, columns), (row_roots, column_roots) = _sums(v.reshape(shape.d_out, shape.d_in))
    eps *= correction**0.5  # (√v̂ + ε)² = (√v + ε √correction)² / correction
    r = _squares(rows, row_roots, eps, columns)
    c = _squares(columns, column_roots, eps, rows)
    return Scale(_power(r, rows, -0.25) * r.sum() ** 0.25, _power(c, columns, -0.25) * correction**0.25)


def _sums(v: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The sums of v over each row and each column, and those of √v."""
    pieces, rows = _pieces(v), []
    across, columns, column_roots = v.new_ones(v.shape[1]), v.new_zeros(v.shape[1]), v.new_zeros(v.shape[1])
    space = torch.empty_like(pieces[0])
    for piece in pieces:
        root, down = torch.sqrt(piece, out=space[: len(piece)]), v.new_ones(len(piece))
        rows.append((piece @ across, root @ across))
        columns.addmv_(piece.T, down)
        column_roots.addmv_(root.T, down)
    sums, roots = (torch.cat(x) for x in zip(*rows, strict=True))
    return (sums, columns), (roots, column_roots)


def _squares(v: Tensor, root: Tensor, eps: float, others: Tensor) -> Tensor:
    """Σ (√v + ε)² from Σ v and Σ √v, over the `others` that ever had a gradient; 0 for a row or column without any."""
    return torch.where(v > 0, v + 2 * eps * root + eps**2 * (others > 0).sum(dtype=v.dtype), 0.0)


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """Some rows at a time on a CPU, few enough to stay in its cache while they are looked at more than once."""
    return x.split(max(1, PIECE // max(1, x.shape[1]))) if x.device.type == "cpu" else [x]


def _power(x: Tensor, v: Tensor, exponent: float) -> Tensor:
    return torch.where(v > 0, x**exponent, 0.0)


def scale_contribution(part: Contribution, scale: Scale, shape: Shape) -> Plain:
    """ĝ = P^½ g of one call's contribution."""
    left, right = scale
    part = written_out(part)
    if isinstance(part, Sum):
        return Sum(part.values * left.to(part.values.dtype))
    if isinstance(part, Dense):
        return Dense(scale_dense(part.grads, scale, shape))
    assert right is not None
    a = part.right * right.to(part.right.dtype)
    if part.left.is_floating_point():
        return Outer(part.left * left.to(part.left.dtype), a)
    return Outer(part.left, a * left.to(a.dtype)[part.left][..., None])


def scale_dense(grads: Tensor, scale: Scale, shape: Shape) -> Tensor:
    """The same for gradients (B, *parameter.shape) written out: (B, d_out, d_in), or (B, d_out)."""
    left, right = (None if x is None else x.to(grads.dtype) for x in scale)
    assert left is not None
    if right is None:
        return grads.reshape(-1, shape.d_out) * left
    return grads.reshape(-1, shape.d_out, shape.d_in) * left[:, None] * right


def absorb_scale(basis: Basis, scale: Scale) -> Basis:
    """The basis that takes a row g where `basis` would take ĝ = P^½ g: far fewer numbers to scale than the row's factors."""
    left, right = scale
    return basis._replace(left=_times(left, basis.left), right=None if right is None else _times(right, basis.right))


def dual(whole: Tensor, basis: Basis, scale: Scale, shape: Shape) -> Tensor:
    """L̃ᵀ G R̃ with L̃ = P_L^{−½} L, R̃ likewise: (product,), whose product with Lᵀ ĥ R is ⟨h, G⟩ as far as the sides hold h."""
    inverse = Scale(_inverse(scale.left), None if scale.right is None else _inverse(scale.right))
    return project_dense(whole[None], shape, absorb_scale(basis._replace(core=None), inverse))[0]


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0.0)


def _times(diagonal: Tensor, side: Side) -> Tensor:
    return torch.diag(diagonal) if side is None else diagonal[:, None] * side


def size(gradient: Tensor, scale: Scale, shape: Shape) -> Tensor:
    """‖P^½ g‖² of one gradient."""
    left, right = (None if x is None else x.square() for x in scale)
    assert left is not None
    wide = gradient.to(torch.promote_types(gradient.dtype, left.dtype))
    if right is None:
        return wide.flatten().square() @ left
    pieces = _pieces(wide.reshape(shape.d_out, shape.d_in))
    space = torch.empty_like(pieces[0])
    return left @ torch.cat([torch.mul(piece, piece, out=space[: len(piece)]) @ right for piece in pieces])


def drift(before: Scale, now: Scale) -> Tensor:
    """Mean square of the change of log P from one step to the next, over the coordinates that both know; 0 without any.

    The change at (i, j) is α_i + β_j, so the mean square is var α + var β + (mean α + mean β)².
    """
    pairs = [(a, b) for a, b in zip(before, now, strict=True) if a is not None and b is not None]
    changes = [2 * (b / a)[(a > 0) & (b > 0)].log() for a, b in pairs]
    if not all(len(x) for x in changes):
        return changes[0].new_zeros(())
    spread = torch.stack([x.var(correction=0) for x in changes]).sum()
    return spread + torch.stack([x.mean() for x in changes]).sum().square()
