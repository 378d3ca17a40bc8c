r"""Curvature of a loss: the Gauss–Newton matrix from the model's output, and scores through an inverse.

    ∇²_f ℓ_b = U_b U_bᵀ,      GGN = Σ_b J_bᵀ U_b U_bᵀ J_b,      rows J_bᵀ u_bk = ∇_θ ⟨u_bk, f(θ, x_b)⟩

For a cross-entropy these are the model's own sampled labels, all at once; for a squared error Jᵀ times √2. With a
random ε of mean 0 and covariance I, ∇⟨U_b ε, f⟩ is one draw whose second moment is the GGN.
Positive curvature only: negative eigenvalues of a non-convex loss are dropped.

Scores are computed on the smaller side of the table, positive where V and G point the same way. Sums run in float64; the products of
float32 rows in float32, in chunks:

    V (GᵀG + ρI)⁻¹ Gᵀ  =  V Gᵀ (GGᵀ + ρI)⁻¹                        p × p on the left, N × N on the right
    V (CᵀC + ρI)⁻¹ Gᵀ  =  (V Gᵀ − V Cᵀ (CCᵀ + ρI)⁻¹ C Gᵀ) / ρ      Woodbury, for curvature rows C other than G

Assumes: `loss` calls the model once, and knows it by its output (one tensor) alone, sample b by row b.
Shapes:  B samples, C outputs of a sample; V (Q, p), G (N, p), C (M, p).
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..capture.model_state import in_mode
from ..errors import NumericalError, UsageError
from ..run.gradients import LossFn

MOST_OUTPUTS = 2048  # of one sample; each takes a backward pass
NOTHING = 1e-14  # eigenvalues below this share of the largest are rounding
CHUNK = 8192
SINGULAR = 1e-13  # smallest to largest squared pivot


def output_factors(model: nn.Module, loss: LossFn, batch: Any) -> Tensor:
    """U (B, C, C) with U Uᵀ = ∇²_f ℓ, in eval mode."""
    outputs: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Any) -> Tensor:
        outputs.append(_tensor(output).detach().requires_grad_())
        return outputs[-1]

    with model.register_forward_hook(cut), in_mode(model), torch.enable_grad():
        losses = loss(model, batch)
        return _factors(_hessian(losses, _only(outputs)))


def output_loss(loss: LossFn, u: Tensor) -> LossFn:
    """A loss whose entries are ⟨u_b, f(θ, x_b)⟩, for u (B, C); `loss` is only called for how it calls the model."""

    def product(model: nn.Module, batch: Any) -> Tensor:
        outputs: list[Tensor] = []
        with model.register_forward_hook(lambda module, args, output: outputs.append(_tensor(output))):
            loss(model, batch)
        return (_only(outputs).flatten(1) * u.to(outputs[0])).sum(1)

    return product


def _hessian(losses: Tensor, output: Tensor) -> Tensor:
    """(B, C, C), one double backward for each output."""
    if losses.dim() != 1 or len(losses) != len(output):
        raise UsageError(
            f"the loss must return one value per sample, got losses {tuple(losses.shape)} for an output "
            f"{tuple(output.shape)}."
        )
    (first,) = torch.autograd.grad(losses.sum(), output, create_graph=True)
    flat = first.flatten(1)  # (B, C)
    if not flat.requires_grad:  # a loss that is linear in the output
        return torch.zeros(*flat.shape, flat.shape[1], dtype=flat.dtype, device=flat.device)
    if flat.shape[1] > MOST_OUTPUTS:
        raise UsageError(
            f"the Gauss–Newton matrix supports at most {MOST_OUTPUTS:,} outputs per sample, got {flat.shape[1]:,}. "
            "Pass hessian='fisher'."
        )
    columns = [
        torch.autograd.grad(flat[:, c].sum(), output, retain_graph=True, materialize_grads=True)[0].flatten(1)
        for c in range(flat.shape[1])
    ]
    return torch.stack(columns, 2)


def _factors(H: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(H.double())
    floor = NOTHING * values.abs().max()
    U: Tensor = vectors * values.where(values > floor, 0).sqrt()[:, None, :]
    return U.to(H.dtype)


def _tensor(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() < 1:
        raise UsageError(f"the model must return one tensor with one row per sample, got {type(output).__name__}.")
    return output


def _only(outputs: list[Tensor]) -> Tensor:
    if len(outputs) != 1:
        raise UsageError(
            f"the loss must call the model exactly once, as model(…), but called it {len(outputs)} times. Pass "
            "hessian='fisher' instead."
        )
    return outputs[0] if outputs[0].dim() > 1 else outputs[0][:, None]


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
            f"the {len(A):,}-dimensional curvature is singular. Pass a larger damping=, or a smaller rank=."
        )
    return torch.cholesky_solve(B, L)


def by_rows(V: Tensor, G: Tensor, ridge: float) -> Tensor:
    """V (GᵀG + ρI)⁻¹ Gᵀ, (Q, N)."""
    n, p = G.shape
    if p <= n:
        return by_moment(V, G, moment(G), ridge)
    if ridge <= 0:
        raise NumericalError(
            f"the curvature of {p:,} coordinates from only {n:,} samples is singular. Pass damping=, or a smaller rank=."
        )
    return solve(products(G, G), ridge, products(V, G).T).T


def by_moment(V: Tensor, G: Tensor, H: Tensor, ridge: float) -> Tensor:
    """V (H + ρI)⁻¹ Gᵀ for H (p, p)."""
    return products(solve(H, ridge, V.double().T).T, G)


def by_other_rows(V: Tensor, G: Tensor, C: Tensor, ridge: float) -> Tensor:
    """V (CᵀC + ρI)⁻¹ Gᵀ with fewer rows in C than coordinates."""
    if ridge <= 0:
        raise NumericalError(
            f"the curvature of {C.shape[1]:,} coordinates from only {len(C):,} curvature samples is singular. Pass damping=."
        )
    bent = products(V, C) @ solve(products(C, C), ridge, products(C, G))
    return (products(V, G) - bent) / ridge
