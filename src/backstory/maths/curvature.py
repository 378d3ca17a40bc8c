r"""Where curvature rows begin: gradients at the model's outputs whose squares average to the output Hessian.

For ℓ_z = c_z Σ_s ℓ_s(f_s), s over the positions of sample z, the generalised Gauss-Newton matrix is
c_z Σ_s J_sᵀ H_s J_s. A seed is what a backward pass starts from; the pass turns it into a row h = Σ_s J_sᵀ seed_s.

    cross-entropy   H = diag(p) − ppᵀ     sampled: p − 1_y, y ~ p        exact: √p_c (p − 1_c), one per class
    bce             H = p(1−p)            sampled: p − y, y ~ p          exact: √(p(1−p)) 1_o, one per output
    squared-error   H = 2 I               sampled: √2 ε, ε ~ N(0, 1)     exact: √2 1_o, one per output

Sampled seeds are independent between positions, so E[h hᵀ] = Σ_s J_sᵀ H_s J_s from one pass; k draws take κ = w c/k.
Exact seeds touch one position at a time, S·C passes in all, with κ = w c. A masked position has no seed.

Shapes:  outputs (B, *positions, C); for bce and squared-error every entry is a position of its own.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError

CURVATURE = re.compile(
    r"(empirical|sampled(:(?P<draws>\d+))?|exact:(?P<classes>\d+)|ggn:(?P<passes>\d+))(/(?P<groups>\d+))?"
)
KINDS = ("cross-entropy", "squared-error", "bce")
MOST_EXACT = 512  # backward passes a step that `exact` may cost


def sampled_seed(outputs: Tensor, kind: str, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
    """One draw, shaped like `outputs`; random numbers come from `generator` (on the CPU) alone."""
    f = outputs.detach()
    wide = f.to(torch.promote_types(f.dtype, torch.float32))
    if kind == "cross-entropy":
        p = wide.softmax(-1)
        u = torch.rand(p.shape[:-1], generator=generator, dtype=torch.float64).to(p.device)
        drawn = (p.double().cumsum(-1) < u[..., None]).sum(-1).clamp(max=p.shape[-1] - 1)
        seed = p - torch.nn.functional.one_hot(drawn, p.shape[-1]).to(p.dtype)
    elif kind == "bce":
        p = wide.sigmoid()
        seed = p - (torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p.device) < p).to(p.dtype)
    else:
        seed = 2**0.5 * torch.randn(wide.shape, generator=generator, dtype=torch.float64).to(wide)
    return _masked(seed, mask).to(f.dtype)


def exact_seeds(outputs: Tensor, kind: str, mask: Tensor | None = None) -> Iterator[Tensor]:
    """All seeds, one for each position and class (or output): their squares add up to the output Hessian."""
    n = n_exact(outputs)
    if n > MOST_EXACT:
        raise UnsupportedError(
            f"curvature='exact' would take {n} backward passes per step, one per output entry of a sample; the limit "
            f"is {MOST_EXACT}. Use curvature='sampled'."
        )
    f = outputs.detach()
    wide = f.to(torch.promote_types(f.dtype, torch.float32))  # in half precision 1 − p would be 0 too soon
    p = wide.softmax(-1) if kind == "cross-entropy" else wide.sigmoid()
    for entry in range(n):
        seed = torch.zeros_like(wide).reshape(len(f), -1)
        seed[:, entry] = 1.0
        seed = seed.reshape(f.shape)
        if kind == "cross-entropy":
            root = (p * seed).sum(-1, keepdim=True).sqrt()  # √p_c at the one position, 0 elsewhere
            seed = root * (p - seed)
        else:
            seed = seed * ((p * (-wide).sigmoid()).sqrt() if kind == "bce" else 2**0.5)
        yield _masked(seed, mask).to(f.dtype)


def n_exact(outputs: Tensor) -> int:
    """How many exact seeds one sample has."""
    return outputs[0].numel()


def positions(outputs: Tensor, kind: str, mask: Tensor | None) -> Tensor:
    """How many loss terms each sample has, (B,): what a mean inside the sample divides by."""
    shape = outputs.shape[1:-1] if kind == "cross-entropy" else outputs.shape[1:]
    if mask is None:
        return torch.full((len(outputs),), float(shape.numel()), dtype=torch.float64)
    inner = 1 if kind == "cross-entropy" or mask.shape == outputs.shape else outputs.shape[-1]
    return mask.detach().reshape(len(mask), -1).double().sum(1).cpu() * inner


def check(outputs: Tensor, kind: str, mask: Tensor | None) -> None:
    """Raise unless the outputs have the form that their kind needs."""
    if kind == "cross-entropy" and (outputs.dim() < 2 or outputs.shape[-1] < 2):
        raise UsageError(
            "outputs for cross-entropy must have shape (B, *positions, classes), with classes last, got "
            f"{tuple(outputs.shape)}."
        )
    if mask is not None and mask.shape not in (outputs.shape[:-1], outputs.shape):
        raise UsageError(f"mask must have shape {tuple(outputs.shape[:-1])}, got {tuple(mask.shape)}.")


def _masked(seed: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return seed
    keep = mask.to(seed)
    return seed * (keep if keep.shape == seed.shape else keep.unsqueeze(-1))
