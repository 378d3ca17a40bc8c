r"""How much each term of the loss weighs, seen from the gradient that comes back to a model's outputs in the first step.

With f the outputs at one position and δ = ∂L/∂f, a term of weight w that is

    a cross-entropy   has δ = w (softmax f − e_y):   y where δ is smallest,  w = −δ_y / (1 − p_y),  and δ_c = w p_c for the others
    a BCE             has δ = w (σ(f) − y):          y = 1 where δ < 0

so w is measured without the loss or its labels. Positions without gradient (padding, labels of −100) have no term. Only what all
terms of a sample agree on counts; other losses do not fit, and nothing is measured of them.

Shapes:  B samples, S positions, C classes; BCE has one term for each output.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.hooks import HALF

CLOSE = {True: 3e-2, False: 2e-3}  # relative, in half precision and else
SURE = 1e-3  # 1 − p_y below this is rounding


class LossTerms(NamedTuple):
    """Of the samples of a micro-batch."""

    weight: Tensor  # (B,) of one term, float64, with the loss scale
    number: Tensor  # (B,) of terms


def terms_of(outputs: Tensor, delta: Tensor) -> LossTerms | None:
    """What a micro-batch shows; None where the loss is another one."""
    if outputs.dim() == 0 or outputs.shape != delta.shape or not outputs.numel() or not outputs.is_floating_point():
        return None
    half = outputs.dtype in HALF or delta.dtype in HALF
    found = None
    if outputs.dim() > 1 and outputs.shape[-1] > 1:
        found = _of_samples(
            outputs.flatten(1, -2) if outputs.dim() > 2 else outputs[:, None], delta, _cross_entropy, half
        )
    return found or _of_samples(outputs.reshape(len(outputs), -1, 1), delta, _bce, half)


def _of_samples(
    f: Tensor, delta: Tensor, read: Callable[[Tensor, Tensor, float], Tensor | None], half: bool
) -> LossTerms | None:
    """One sample at a time: outputs may be large."""
    weights, counts = [], []
    for x, d in zip(f, delta.reshape(f.shape), strict=True):  # (S, C)
        there = d.abs().amax(1) > 0
        w = read(x[there], d[there], CLOSE[half])
        if w is None or not len(w) or bool(((w - w.median()).abs() > CLOSE[half] * w.median()).any()):
            return None
        weights.append(float(w.median()))
        counts.append(int(there.sum()))
    weight, count = torch.tensor(weights, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)
    return LossTerms(weight, count) if bool((weight > 0).all()) and int(count.sum()) > 2 else None


def _cross_entropy(f: Tensor, delta: Tensor, close: float) -> Tensor | None:
    """w of each position, those left out whose label is certain; None where δ does not fit."""
    f, delta = f.float(), delta.float()
    p = f.softmax(1)  # (S, C)
    label = delta.argmin(1, keepdim=True)
    missing = 1 - p.gather(1, label)[:, 0]
    w = -delta.gather(1, label)[:, 0] / missing.clamp_min(1e-30)
    e = torch.zeros_like(p).scatter_(1, label, 1.0)
    rest = (delta - w[:, None] * (p - e)).norm(dim=1)
    clear = missing > SURE
    fits = rest[clear] <= close * delta[clear].norm(dim=1)
    return w[clear].double().cpu() if bool(fits.all()) else None


def _bce(f: Tensor, delta: Tensor, close: float) -> Tensor | None:
    f, delta = f[:, 0].double(), delta[:, 0].double()
    off = torch.where(delta < 0, (-f).sigmoid(), f.sigmoid())
    return (delta.abs() / off.clamp_min(1e-30))[off > SURE].cpu()
