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
Shapes:  Q queries, B sequences in a step, S tokens in each, V vocabulary, N occurrences; parameters keep their shapes, Q in front.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from backstory.exact.losses import QueryLoss, gradients, step_gradient
from backstory.exact.reverse import Moment, backward, boundaries, segments
from backstory.replay.tape import RecipeSource, Tape, own_randomness

Curvature = Literal["none", "exact", "hessian"]
Vector = list[Tensor]  # one tensor for each parameter


def sweep(recipe: RecipeSource, query: QueryLoss, curvature: Curvature, *, dtype: torch.dtype | None) -> Tensor:
    """Influences (N, Q) of all occurrences on the queries, in the order of the run."""
    with own_randomness():
        tape = Tape(recipe, dtype=dtype)
        bounds = boundaries(tape.length, None)
        tape.record(bounds)
        x = gradients(tape.recipe, query, tape.parameters)
        m = [torch.zeros_like(y) for y in x]
        result: list[Tensor] = []
        for first, end in segments(bounds, tape.length):
            for moment in backward(tape, first, end):
                scores, x, m = _back(tape, moment, x, m, curvature)
                result.insert(0, scores.T)
    return torch.cat(result).double()


def _back(tape: Tape, moment: Moment, x: Vector, m: Vector, curvature: Curvature) -> tuple[Tensor, Vector, Vector]:
    """`(influences (Q, B), x_θ, x_m)` before the step."""
    t, steps = moment.step, tape.coefficients[moment.step]
    tape.load(moment.before.theta)
    P = [1 / ((v / k.root).sqrt() + k.eps) for v, k in zip(moment.after.v, steps, strict=True)]
    u = [b - k.rate * k.a * p * a for a, b, p, k in zip(x, m, P, steps, strict=True)]
    w = tape.weights(t).to(u[0])
    gradient = step_gradient(lambda: tape.losses(t), w, tape.parameters)
    r = clipped([(1 - k.tau) * y for y, k in zip(u, steps, strict=True)], gradient.grads, tape.recipe.clip_norm)
    dots, turned = gradient.pull(r) if curvature == "hessian" else gauss_newton(tape, t, r, w)
    keep = 0.0 if curvature == "none" else 1.0
    x = [(1 - k.rate * k.decay) * y + keep * h for y, h, k in zip(x, turned, steps, strict=True)]
    return -w * dots, x, [k.mu * y for y, k in zip(u, steps, strict=True)]


def clipped(s: Vector, grads: Sequence[Tensor], limit: float | None) -> Vector:
    """J s, of each of the Q in front: the derivative of clip_grad_norm_ at this gradient, which is symmetric."""
    size = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    if limit is None or float(size) + 1e-6 <= limit:
        return s
    along = torch.stack([(y * g).flatten(1).sum(1) for y, g in zip(s, grads, strict=True)]).sum(0) / size  # (Q,)
    c, rho = limit / (size + 1e-6), size / (size + 1e-6)
    shares = [(rho * along / size).reshape(-1, *[1] * g.dim()) * g for g in grads]
    return [c * (y - share) for y, share in zip(s, shares, strict=True)]


def gauss_newton(tape: Tape, t: int, r: Vector, w: Tensor) -> tuple[Tensor, Vector]:
    """`(⟨∇ℓ_z, r⟩ (Q, B), Jᶠᵀ w (diag(p) − ppᵀ) Jᶠ r)`; Jᶠ r is the derivative of u ↦ ⟨Jᶠᵀu, r⟩, which is linear."""
    tokens = tape.recipe.batches[t][1]  # (B, S + 1)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attentions have no second derivative
        f = tape.recipe.model(tokens[:, :-1])  # (B, S, V)
        u = torch.zeros_like(f, requires_grad=True)
        pulled = torch.autograd.grad(f, tape.parameters, u, create_graph=True)
    p = f.detach().softmax(-1)
    slope = p.scatter_add(2, tokens[:, 1:, None], -torch.ones_like(p[..., :1]))  # ∂ℓ/∂f
    dots, turned = [], []
    for q in range(len(r[0])):
        (along,) = torch.autograd.grad(pulled, u, [y[q] for y in r], retain_graph=True)
        dots.append((slope * along).sum((1, 2)))
        bent = w[:, None, None] * p * (along - (p * along).sum(-1, keepdim=True))
        turned.append(torch.autograd.grad(f, tape.parameters, bent, retain_graph=True))
    return torch.stack(dots), [torch.stack(column) for column in zip(*turned, strict=True)]
