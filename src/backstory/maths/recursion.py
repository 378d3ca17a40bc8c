r"""The paper's equations as it has them: embeddings of a run (Algorithm 1), and of a run in segments (Algorithm 2).

A sample z in the batch of step t moved the parameters by −η_t w_z g_t(z). Each later step bent that displacement by
(I − η H), with H = Σ_z w_z g(z) g(z)ᵀ, the empirical Fisher. With K_t the product of the steps after t,

    e_t(z)  = η_t w_z K_t g_t(z)                      embedding         (Eq. 2)
    K_{t−1} = K_t − Σ_z e_t(z) g_t(z)ᵀ                propagator        (Algorithm 1, with M = I − K)

from K = I at the last step. The influence of z on a query q is ⟨∇ℓ(θ_T, q), e_t(z)⟩; positive: without z the loss of q would be
higher. A run in segments is swept segment by segment, each from its own K = I; then the later segments bend what the earlier left:

    e_t(z)  ←  K^(S) ··· K^(s+1) e_t^(s)(z)           stitching         (Algorithm 2)

This file is for reading, and what the fast path is tested against. `blocked` computes the same for every optimizer of `steps`
(momentum, decay, clipping, Adam), several steps at a time, and without p × p matrices where few rows are left.

Assumes: plain SGD. Shapes: B samples in a step, p coordinates; rows are samples, so equations appear transposed.
Numbers refer to Wang et al., Capturing the Temporal Dependence of Training Data Influence, ICLR 2025.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SgdStep(NamedTuple):
    """What one step of plain SGD leaves behind."""

    G: Tensor  # (B, p) gradients of the samples' own losses
    w: Tensor  # (B,) weights of these losses in the step's loss: 1/B for a mean
    rate: float  # η


class Segment(NamedTuple):
    """Some consecutive steps, embedded at their own end."""

    E: list[Tensor]  # (B, p) of each step
    K: Tensor  # (p, p) what the segment does to a displacement from before it


def embed(steps: Sequence[SgdStep]) -> Segment:
    """Algorithm 1, from the last step to the first."""
    K = torch.eye(steps[0].G.shape[1], dtype=steps[0].G.dtype)
    E: list[Tensor] = []
    for G, w, rate in reversed(steps):
        E.insert(0, rate * w[:, None] * (G @ K.T))  # (B, p)
        K = K - E[0].T @ G  # (p, p)
    return Segment(E, K)


def stitch(segments: Sequence[Segment]) -> list[Tensor]:
    """Algorithm 2: the embeddings of all steps at the end of the last segment."""
    later = torch.eye(len(segments[0].K), dtype=segments[0].K.dtype)  # (p, p) of the segments after this one
    out: list[Tensor] = []
    for E, K in reversed(segments):
        out = [e @ later.T for e in E] + out
        later = later @ K
    return out
