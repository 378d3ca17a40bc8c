r"""The loss's curvature in the model's output, for any loss: what a Gauss–Newton matrix needs.

    ∇²_f ℓ_b = U_b U_bᵀ,      GGN = Σ_b J_bᵀ U_b U_bᵀ J_b,      rows J_bᵀ u_bk = ∇_θ ⟨u_bk, f(θ, x_b)⟩

For a cross-entropy these are the model's own sampled labels, all at once; for a squared error Jᵀ times √2. With a
random ε of mean 0 and covariance I, ∇⟨U_b ε, f⟩ is one draw whose second moment is the GGN.
Positive curvature only: negative eigenvalues of a non-convex loss are dropped.
Assumes: `loss` calls the model once, and knows it by its output (one tensor) alone, sample b by row b.
Shapes:  B samples, C outputs of a sample.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..run.gradients import LossFn
from .models import evaluated

MOST_OUTPUTS = 2048  # of one sample; each takes a backward pass
NOTHING = 1e-14  # eigenvalues below this share of the largest are rounding


def output_factors(model: nn.Module, loss: LossFn, batch: Any) -> Tensor:
    """U (B, C, C) with U Uᵀ = ∇²_f ℓ, in eval mode."""
    held: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Any) -> Tensor:
        held.append(_tensor(output).detach().requires_grad_())
        return held[-1]

    handle = model.register_forward_hook(cut)
    try:
        with evaluated(model), torch.enable_grad():
            losses = loss(model, batch)
            return _factors(_hessian(losses, _only(held)))
    finally:
        handle.remove()


def output_loss(loss: LossFn, u: Tensor) -> LossFn:
    """A loss whose entries are ⟨u_b, f(θ, x_b)⟩, for u (B, C); `loss` is only called for how it calls the model."""

    def pulled(model: nn.Module, batch: Any) -> Tensor:
        held: list[Tensor] = []
        handle = model.register_forward_hook(lambda module, args, output: held.append(_tensor(output)))
        try:
            loss(model, batch)
        finally:
            handle.remove()
        return (_only(held).flatten(1) * u.to(held[0])).sum(1)

    return pulled


def _hessian(losses: Tensor, output: Tensor) -> Tensor:
    """(B, C, C), one double backward for each output."""
    if losses.dim() != 1 or len(losses) != len(output):
        raise UsageError(
            f"found losses {tuple(losses.shape)} for an output {tuple(output.shape)}; expected one loss for each row."
        )
    (first,) = torch.autograd.grad(losses.sum(), output, create_graph=True)
    flat = first.flatten(1)  # (B, C)
    if not flat.requires_grad:  # a loss that is linear in the output
        return torch.zeros(*flat.shape, flat.shape[1], dtype=flat.dtype, device=flat.device)
    if flat.shape[1] > MOST_OUTPUTS:
        raise UsageError(
            f"found {flat.shape[1]:,} outputs of one sample; expected at most {MOST_OUTPUTS:,} for the Gauss–Newton matrix. "
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
        raise UsageError(f"the model put out {type(output).__name__}; expected one tensor with a row for each sample.")
    return output


def _only(held: list[Tensor]) -> Tensor:
    if len(held) != 1:
        raise UsageError(
            f"the loss called the model {len(held)} times; expected once, as model(…). Pass hessian='fisher' instead."
        )
    return held[0] if held[0].dim() > 1 else held[0][:, None]
