"""Consecutive uniform steps that share orthogonal curvature rows V, column by column.

With A₀, C₀ at the end of the window, s₁, s₂ how S of a step is made of them, and m_j = S n_j what clipping takes out of step j
(see steps), passed through that step,

    A = a₁ A₀ + a₂ C₀ + X V        C and S the same, with Y V and Z V
    X = A₀ Vᵀ diag x₁ + C₀ Vᵀ diag x₂ + Σ_j m_j x_jᵀ

Orthogonal rows do not mix columns, so a step t changes numbers alone, each x, y, z and unit vector e (K, R):

    u = y − η a x
    z = (1−τ) u − η n x
    x ← (1−ηλ') x + λ z + c (s₁ e₁ + s₂ e₂ + z ‖v‖² − e_t dᵀ)/(1 + γα ‖v‖²)        d = ⟨v, ∇L⟩, where the step was clipped
    y ← μ u

Shapes:  R rows of V, K = 2 + the clipped steps, N gradient rows of all steps and one for each clipped step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .low_rank import FIRST
from .steps import Contraction, Step, implicit, squares


class Columns(NamedTuple):
    """What the steps of a window need of Z, and X and Y before the first one."""

    z: Tensor  # (steps, 2, R) z₁ and z₂ of each
    L: Tensor  # (N, clipped) products of each row with z_j of its own step: 0 unless j is later
    x: Tensor  # (K, R)
    y: Tensor  # (K, R)


def columns(steps: Sequence[Step], effects: Tensor, met: Sequence[Tensor], contraction: Contraction) -> Columns:
    """The recursion, from the last step to the first; `effects` (steps, 2) are s₁ and s₂, `met` the rows of each step times Vᵀ."""
    q = squares(steps[0])
    clipped = [i for i, s in enumerate(steps) if s.clip < 1]
    x = y = q.new_zeros(FIRST + len(clipped), len(q))
    kept, L = q.new_zeros(len(steps), FIRST, len(q)), []
    for i in reversed(range(len(steps))):
        step, k = steps[i], steps[i].coefficients
        u = y - x * (k.pace * k.a)
        z = u * (1 - k.tau) - x * (k.pace * k.n)
        kept[i] = z[:FIRST]
        L.append(met[i] @ z[FIRST:].T)
        moved = z * q
        moved[:FIRST] += effects[i, :, None].to(q)
        if step.clip < 1:
            assert step.dot_v is not None
            moved[FIRST + clipped.index(i)] -= step.dot_v
            moved *= step.clip
        alike = step._replace(V=q.sqrt()[:, None])  # rows of these norms, orthogonal too, of one number each
        x = x * (1 - k.rate * k.decay) + z * k.l2 + implicit(alike, contraction, moved.T).T
        y = u * k.momentum
    return Columns(kept, torch.cat(L[::-1]), x, y)
