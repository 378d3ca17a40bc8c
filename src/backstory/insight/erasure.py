r"""What later steps took from a sample: Theorem 1 of the paper, for every optimizer of `maths.steps`.

Leaving an occurrence out moves (θ, m) at its own step by (d^θ, d^m). If no later step bent that displacement (no
curvature, no decay), the momentum's buffer would pay out what it holds and nothing else would happen:

    own step t:    d^m = −(1−τ) w J g,           d^θ = η P ((1−τ) a + n) w J g
    later k, free: d^m ← μ d^m,                  d^θ ← d^θ − η a P d^m

In truth step k adds what follows from u' = (J H̃ + λ) d^θ, and the decay −ηλ' d^θ. Let x be the adjoint of `maths.adjoint` after step k, s
its effect of u at step k, and d the *free* displacement before step k. The product of true steps, from the left, and free steps, from
the right, changes by one step at a time, and the changes add up without a remainder:

    ⟨v, d_T⟩ − ⟨v, e⟩ = Σ_k ( Σ_r −⟨s, J V_r⟩ (W V d)_r  −  λ⟨s, d⟩ + ηλ'⟨x_θ, d⟩ ),     W = (I + V γα Vᵀ)⁻¹

A row of curvature belongs to an occurrence, so each occurrence of step k has a term of its own: with h = g it is

    (its own influence on the query) × (W V d)_r / √w,       in the literal form and for SGD  ⟨g_k(z), d⟩ × influence of z at k

which is the paper's Theorem 1: a later sample takes over as much as its gradient overlaps with the displacement. In the implicit
form W shares the overlap out among the rows of the step, and nothing is left over. The decays (λ and λ') have a term of their own.

Shapes:  B occurrences and R curvature rows of a step, p kept coordinates; one query, one sample.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..maths.adjoint import Adjoint
from ..maths.steps import Step, clipped_curvature, clipped_gradients, curvature_rows, implicit

FADED = 1e-20  # share of a buffer below which it pays out nothing more


class Moved(NamedTuple):
    """What leaving an occurrence out does to the state at its own step."""

    theta: Tensor  # (p,) d^θ
    momentum: Tensor  # (p,) d^m


class Pay(NamedTuple):
    """How a step pays out the momentum's buffer."""

    keep: float | Tensor  # μ
    pace: float | Tensor  # η a P


class Taken(NamedTuple):
    """What one later step took of the influence."""

    rows: Tensor  # (B,) by the curvature of each occurrence
    decay: float


def moved(step: Step, row: int) -> Moved:
    """The displacement by occurrence `row` of the step."""
    k = step.coefficients
    pulled = step.w[row] * clipped_gradients(step)[row]  # (p,) w J g
    return Moved(pulled * (k.pace * ((1 - k.tau) * k.a + k.n)), pulled * -(1 - k.tau))


def free_path(own: Mapping[int, Moved], pays: Iterable[Pay]) -> list[Tensor]:
    """d^θ before each of the steps 0 … n and after the last one, if nothing bent it; `own`: step -> what is moved there.

    Where the buffer is empty the displacement stays, and so does its tensor: memory grows only while it pays out.
    """
    p = next(iter(own.values())).theta
    theta, buffer, largest = torch.zeros_like(p), torch.zeros_like(p), 0.0
    path = [theta]
    for k, pay in enumerate(pays):
        buffer = buffer * pay.keep
        if float(buffer.abs().max()) > FADED * largest:
            theta = theta - buffer * pay.pace
        if k in own:
            theta, buffer = theta + own[k].theta, buffer + own[k].momentum
            largest = max(largest, float(buffer.abs().max()))
        path.append(theta)
    return path


def taken(adjoint: Adjoint, step: Step, d: Tensor) -> Taken:
    """The terms of one step for the displacement d (p,) before it; the adjoint is after the step and does not move."""
    k, V = step.coefficients, curvature_rows(step)
    s, x = adjoint.effect(step)[0], adjoint.x_theta[0]  # (p,)
    overlap = implicit(step, adjoint.contraction, (V @ d)[:, None])  # (R, 1)
    rows = -(clipped_curvature(step) @ s) * overlap[:, 0]  # (R,)
    decay = float(((x * (k.rate * k.decay) - s * k.l2) * d).sum())
    return Taken(rows.reshape(len(step.w), -1).sum(1), decay)
