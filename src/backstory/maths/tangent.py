r"""Removing a sample from *all* its occurrences: its own curvature is missing at the later ones too.

The sum of embeddings takes every occurrence alone. Exactly (to first order in the displacement x, with the rows'
curvature), carry what the removals so far have done to (θ, m) forward in time: for a tracked sample z,

    u' = J (H̃ x − Σ_{r of z} V_r (W V x)_r) + λ x − J w_z g_z        (the terms of z only where it occurs)
    y' = μ y + (1−τ) u'
    x' = (1−ηλ') x − η P (a y' + n u')

with H̃ x = Σ_r V_r (W V x)_r, W = (I + V γα Vᵀ)⁻¹. At the end x is the displacement of θ_T; its product with a query's
gradient is the influence, positive where the sample helped. For plain SGD with h = g this is Σ ω_i e_i with
ω_i = 1 + (κ/w) ⟨g_i, x_i⟩. Where steps share curvature rows, none of these is z's; what is missing is then what its occurrence keeps
of its own, or where it keeps nothing that of its gradient, h = g.

Shapes:  M tracked samples, B rows and R curvature rows of a step, p kept coordinates.
"""

from collections.abc import Iterable

import torch

from .steps import Contraction, Step, clipped_curvature, clipped_gradients, curvature_rows, implicit


class Tangent:
    """Displacements (x, y) of (θ, m) for M tracked samples, carried forward from the start of the run."""

    def __init__(self, n_tracked: int, p: int, *, dtype: torch.dtype, contraction: Contraction = "always") -> None:
        self.x = torch.zeros(n_tracked, p, dtype=dtype)
        self.y = torch.zeros_like(self.x)
        self.contraction = contraction

    def advance(self, step: Step, rows: Iterable[tuple[int, int]]) -> None:
        """Take one step; `rows` says at which rows of the step a tracked sample occurs: pairs (tracked, row)."""
        k, V, JV = step.coefficients, curvature_rows(step), clipped_curvature(step)
        WVx = implicit(step, self.contraction, V @ self.x.T).T  # (M, R)
        JG = clipped_gradients(step)
        per = (len(V) - step.shared) // max(1, len(step.w))  # curvature rows of one sample
        source = torch.zeros_like(self.x)
        for tracked, row in rows:
            pull = step.w[row]
            if step.orthogonal:
                pull = pull * (1 + step.G[row] @ self.x[tracked])
            else:
                WVx[tracked, row * per : (row + 1) * per] = 0.0  # its own curvature is gone with it
            source[tracked] += pull * JG[row]
        u = WVx @ JV + self.x * k.l2 - source
        self.y = self.y * k.momentum + u * (1 - k.tau)
        self.x = self.x * (1 - k.rate * k.decay) - (self.y * k.a + u * k.n) * k.pace
