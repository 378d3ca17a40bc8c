r"""Scores of every occurrence in full coordinates, from a replay: what is lost by the curvature alone, without any projection.

The adjoint of AdamW with clipping, P = 1/(√v̂+ε) as it was in the run. Last step first, from x_θ = ∇ℓ(θ_T, q) and x_m = 0:

    u = x_m − η a P x_θ;   r = J (1−τ) u                   J = c (I − ρ ĝĝᵀ) where clipping acts, else 1
    influence of z at t = −w_z ⟨∇ℓ(θ_t, z), r⟩
    x_θ ← (1−ηλ') x_θ + H r;   x_m ← μ u

with H r, of the step's own batch at the step's own weights, one of

    none        0                                          no curvature: what later steps did is left out, as in TracIn
    exact       Jᶠᵀ w (diag(p) − ppᵀ) Jᶠ r                 the Gauss–Newton matrix, f the logits: exact, no sampling
    hessian     H r                                        the true Hessian; only that v depends on θ is left out

Exact unrolling also follows v. Nothing is written to disk; one sweep takes a few trainings for each query.

Assumes: AdamW; next-token cross-entropy, summed over a sequence's tokens.
Shapes:  Q queries, B sequences in a step, S tokens in each, V vocabulary, N occurrences; parameters keep their shapes.
"""

from contextlib import closing
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from backstory.exact.cache import ProgressFile
from backstory.exact.derivative import Update
from backstory.exact.losses import QueryLoss, StepGradient
from backstory.exact.reverse import Sweep
from backstory.exact.states import States
from backstory.replay.tape import RecipeSource, Tape, own_randomness

Curvature = Literal["none", "exact", "hessian"]


def sweep(recipe: RecipeSource, query: QueryLoss, curvature: Curvature, *, dtype: torch.dtype | None) -> Tensor:
    """Influences (N, Q) of all occurrences on the queries, in the order of the run."""
    with own_randomness(), closing(States()) as states:
        back = SecondMomentFrozen(Tape(recipe, dtype=dtype), states, curvature)
        back.forward()
        x, _ = back.start(query)
        return back.back(x, ProgressFile(None, ""), None).T


class SecondMomentFrozen(Sweep):
    """The reverse sweep with P as it was in the run, and one of three curvatures."""

    def __init__(self, tape: Tape, states: States, curvature: Curvature) -> None:
        super().__init__(tape, [0], states)
        self.curvature = curvature

    def followed(self, step: Update) -> Update:
        """Without what θ feels of a change of v."""
        return step._replace(k=torch.zeros_like(step.k))

    def products(self, t: int, gradient: StepGradient, r: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """`(⟨∇ℓ_z, r⟩ (B,), H r)` with the curvature that was chosen."""
        if self.curvature == "hessian":
            return gradient.pull(r)
        dots, turned = gauss_newton(self.tape, t, r)
        return dots, [torch.zeros_like(x) for x in turned] if self.curvature == "none" else turned


def gauss_newton(tape: Tape, t: int, r: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """`(⟨∇ℓ_z, r⟩ (B,), Jᶠᵀ w (diag(p) − ppᵀ) Jᶠ r)`; Jᶠ r is the derivative of u ↦ ⟨Jᶠᵀu, r⟩, which is linear."""
    tokens = tape.recipe.batches[t][1]  # (B, S + 1)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attentions have no second derivative
        f = tape.recipe.model(tokens[:, :-1])  # (B, S, V)
        u = torch.zeros_like(f, requires_grad=True)
        pulled = torch.autograd.grad(f, tape.parameters, u, create_graph=True)
    p = f.detach().softmax(-1)
    slope = p.scatter_add(2, tokens[:, 1:, None], -torch.ones_like(p[..., :1]))  # ∂ℓ/∂f
    (along,) = torch.autograd.grad(pulled, u, r, retain_graph=True)
    bent = tape.weights(t).to(p)[:, None, None] * p * (along - (p * along).sum(-1, keepdim=True))
    return (slope * along).sum((1, 2)), list(torch.autograd.grad(f, tape.parameters, bent))
