"""Consecutive uniform steps that share orthogonal curvature rows V, column by column.

With A₀, C₀ at the end of the stretch and m_j = S n_j what clipping takes out of step j (see steps), passed through that step,

    A = a₁ A₀ + a₂ C₀ + X V        C and S the same, with Y V and Z V
    X = A₀ Vᵀ diag x₁ + C₀ Vᵀ diag x₂ + Σ_j m_j x_jᵀ

Orthogonal rows do not mix columns, so a step changes the numbers x, y and z alone: (K, R), K = 2 + the clipped steps.
Knows nothing of propagators: they make matrices of these numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .pending import FIRST
from .steps import Gamma, Step, implicit, squares


class Columns(NamedTuple):
    """Numbers of Z at each step, and of X and Y before the first one."""

    z: Tensor  # (n, K, R)
    x: Tensor  # (K, R)
    y: Tensor  # (K, R)


def columns(steps: Sequence[Step], effects: Tensor, gamma: Gamma) -> Columns:
    """The recursion, from the last step to the first; `effects` (n, 2): how S of each step is made of A₀ and C₀."""
    q = squares(steps[0])
    clipped = [i for i, s in enumerate(steps) if s.clip < 1]
    x = q.new_zeros(FIRST + len(clipped), len(q))
    y, z = torch.zeros_like(x), q.new_zeros(len(steps), *x.shape)
    for i in reversed(range(len(steps))):
        step, k = steps[i], steps[i].coefficients
        u = y - x * (k.pace * k.a)
        z[i] = u * (1 - k.tau) - x * (k.pace * k.n)
        moved = z[i] * q
        moved[:FIRST] += effects[i, :, None].to(q)
        if step.clip < 1:
            assert step.dot_v is not None
            moved[FIRST + clipped.index(i)] -= step.dot_v
            moved *= step.clip
        alike = step._replace(V=q.sqrt()[:, None])  # rows of these norms, orthogonal too, of one number each
        x = x * (1 - k.rate * k.decay) + z[i] * k.l2 + implicit(alike, gamma, moved.T).T
        y = u * k.momentum
    return Columns(z, x, y)
