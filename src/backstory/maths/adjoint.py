r"""Queries without embeddings: carry the query backward, not the samples forward.

x_θ = v = ∇ℓ(θ_T, q), x_m = 0; for t = T−1 … 0:

    u = x_m − η a P x_θ;   s = (1−τ) u − η n P x_θ
    influence of z at t = −w_z ⟨J g_z, s⟩
    x_θ ← (1−ηλ') x_θ + Vᵀ (I + V γα Vᵀ)⁻¹ JV s + λ s
    x_m ← μ u

One pass over the rows, no p × p matrix, no independence between parameters. It is the reference for
everything else: ⟨v, e⟩ of `blocked` equals it to rounding.

Shapes:  Q queries, B rows, p kept coordinates.
"""

import torch
from torch import Tensor

from .steps import Contraction, Step, clipped_curvature, clipped_gradients, curvature_rows, implicit


class Adjoint:
    """The pair (x_θ, x_m) of Q queries, carried backward from the step they belong to."""

    def __init__(self, queries: Tensor, *, contraction: Contraction = "always") -> None:
        self.x_theta = queries.clone()  # (Q, p)
        self.x_m = torch.zeros_like(queries)
        self.contraction = contraction

    def influence(self, step: Step) -> Tensor:
        """Influences (Q, B) of the step's occurrences; moves past the step."""
        k, x = step.coefficients, self.x_theta
        u, s = self._pull(step)  # (Q, p)
        scores = -(s @ clipped_gradients(step).T) * step.w  # (Q, B)
        V = curvature_rows(step)
        JVs = s @ clipped_curvature(step).T  # (Q, R)
        JVs = implicit(step, self.contraction, JVs.T).T
        self.x_theta = x * (1 - k.rate * k.decay) + JVs @ V + s * k.l2
        self.x_m = u * k.momentum
        return scores

    def effect(self, step: Step) -> Tensor:
        """s (Q, p): what a unit of the loss's gradient in this step does to each query; does not move past it."""
        return self._pull(step)[1]

    def _pull(self, step: Step) -> tuple[Tensor, Tensor]:
        k, x = step.coefficients, self.x_theta
        u = self.x_m - x * (k.pace * k.a)
        return u, u * (1 - k.tau) - x * (k.pace * k.n)
