r"""The derivative of one optimizer update, backwards and forwards, in flat coordinates: all parameters in one vector.

With c the clipping factor, g the gradient before it and (see `replay.update`)

    u = c g + λ θ      m' = μ m + (1−τ) u      v' = β₂ v + f u²      θ' = (1−ηλ') θ − η P (a m' + n u)

and k = −η (a m' + n u) dP/dv', which is what θ' feels of a change of v', a change of the state goes on as

    ċ  = −(c / (‖g‖ + 1e-6)) ⟨g, ġ⟩ / ‖g‖  where the step was clipped, else 0
    u̇  = c ġ + ċ g + λ θ̇      ṁ' = μ ṁ + (1−τ) u̇      v̇' = β₂ v̇ + 2 f u u̇
    θ̇' = (1−ηλ') θ̇ − η P (a ṁ' + n u̇) + k v̇'                                                       `push`

and the adjoint x of the state comes back as the transpose of that

    x_v' += k x_θ'      x_m' −= η a P x_θ'      s = (1−τ) x_m' + 2 f u x_v' − η n P x_θ'
    x_g  = c s − (c / (‖g‖ + 1e-6)) g ⟨g, s⟩ / ‖g‖                        the last part where clipped
    x_θ  = (1−ηλ') x_θ' + λ s      x_m = μ x_m'      x_v = β₂ x_v'                                  `pull`

where the part of x_θ that comes through the gradient, H x_g, is left to the caller. At v' = 0 the derivative of P is taken as 0:
there u and m' are 0 too. With RMSprop's momentum P stands inside, m' = μ m + P u and θ' = (1−ηλ') θ − η m': then k = u dP/dv' is what
m' feels. A loss that is maximized has −g in place of g.

Shapes:  n numbers in all; states and adjoints may have Q directions in front.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import NumericalError
from ..replay.update import Coefficients

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}  # of a step's own displacement


class State(NamedTuple):
    """θ, m and v of all parameters, or directions of them: (n,) or (Q, n) each; zeros where the optimizer keeps no m or v."""

    theta: Tensor
    m: Tensor
    v: Tensor


class Span(NamedTuple):
    """Neighbouring parameters that one step updates by the same coefficients."""

    first: int
    last: int
    by: Coefficients


class Update(NamedTuple):
    """One update, at the values where it was taken."""

    after: State
    g: Tensor  # (n,) before clipping
    u: Tensor  # (n,)
    P: Tensor  # (n,)
    k: Tensor  # (n,) −η (a m' + n u) dP/dv', or with P inside u dP/dv'
    clip: float  # c
    slope: float  # c / (‖g‖ + 1e-6) / ‖g‖, or 0 where the step was not clipped
    spans: tuple[Span, ...]


def spans_of(sizes: Sequence[int], coefficients: Sequence[Coefficients]) -> tuple[Span, ...]:
    """The coefficients of each parameter, neighbours with the same ones together."""
    out, first = [], 0
    for by, group in groupby(zip(sizes, coefficients, strict=True), key=lambda pair: pair[1]):
        last = first + sum(size for size, _ in group)
        out.append(Span(first, last, by))
        first = last
    return tuple(out)


def take(now: State, g: Tensor, spans: tuple[Span, ...], max_norm: float | None) -> Update:
    """The update from `now` by the gradient g."""
    clip, slope = 1.0, 0.0
    if max_norm is not None:
        norm = float(torch.linalg.vector_norm(g))
        if (c := max_norm / (norm + 1e-6)) < 1:
            clip, slope = c, c / (norm + 1e-6) / norm
    u, P, k = clip * g, torch.ones_like(g), torch.zeros_like(g)
    theta, m, v = (torch.zeros_like(g) for _ in range(3))
    for first, last, by in spans:
        at = slice(first, last)
        if by.sign < 0:
            u[at].neg_()
        if by.l2:
            u[at] += by.l2 * now.theta[at]
        slope_P = _second_moment(by, at, now, u, v, P)
        if by.momentum:
            torch.add(by.mu * now.m[at], P[at] * u[at] if by.inside else u[at], alpha=1 - by.tau, out=m[at])
        move = by.rate * by.a * m[at]
        if by.n:
            move += by.rate * by.n * u[at]
        if slope_P is not None:
            k[at] = slope_P * (u[at] if by.inside else -move)
            move = move if by.inside else move.mul_(P[at])
        torch.sub((1 - by.rate * by.decay) * now.theta[at], move, out=theta[at])
    return Update(State(theta, m, v), g, u, P, k, clip, slope, spans)


def _second_moment(by: Coefficients, at: slice, now: State, u: Tensor, v: Tensor, P: Tensor) -> Tensor | None:
    """Write v' and P of one span; returns dP/dv', taken as 0 at v' = 0, or None where P is 1."""
    if by.beta2 is None:
        return None
    torch.addcmul(by.beta2 * now.v[at], u[at], u[at], value=by.fresh, out=v[at])
    if not by.scaled:
        return None
    root = (v[at] / by.root).sqrt_()
    torch.reciprocal(root + by.eps, out=P[at])
    return P[at].square().div_(root).mul_(-0.5 / by.root).masked_fill_(root == 0, 0.0)


def check_taken(after: Tensor, taken: Tensor, before: Tensor, t: int) -> None:
    """The step that is differentiated must be the step that torch took; θ after it by both, and before it."""
    wrong, size = float(torch.dist(after, taken)), float(torch.dist(taken, before))
    if wrong > TOLERANCE.get(after.dtype, 1e-1) * size + 1e-300:
        raise NumericalError(
            f"step {t} as differentiated differs from the step that the optimizer took by "
            f"{wrong / max(size, 1e-300):.1e} of its length. Check that every trained parameter gets a gradient in "
            "each step, and that the loss depends only on the model, the batch and torch's generator."
        )


def pull(step: Update, x: State) -> tuple[State, Tensor]:
    """`(the adjoint before the step but for H x_g, x_g)`, from the adjoint after it, which is overwritten."""
    s = torch.zeros_like(x.theta)
    for first, last, by in step.spans:
        at = slice(first, last)
        y, xm, xv = (part[..., at] for part in x)
        move = by.rate * y if by.inside else by.rate * step.P[at] * y
        if by.momentum:
            xm.sub_(move, alpha=by.a)
            torch.mul(xm, 1 - by.tau, out=s[..., at])
        if by.inside:
            s[..., at].mul_(step.P[at])
        if by.beta2 is not None:
            xv.addcmul_(step.k[at], xm if by.inside else y)
            s[..., at].addcmul_(step.u[at], xv, value=2 * by.fresh)
        xm.mul_(by.mu)  # μ = 0 where no m is kept
        if by.n:
            s[..., at].sub_(move, alpha=by.n)
        xv.mul_(by.beta2 or 0.0)
        y.mul_(1 - by.rate * by.decay)
        if by.l2:
            y.add_(s[..., at], alpha=by.l2)
        if by.sign < 0:
            s[..., at].neg_()
    return x, clipped(step, s)


def push(step: Update, dot: State, g: Tensor) -> State:
    """The change of the state after the step, from its change before it and that of the gradient, ġ."""
    u = clipped(step, g)
    theta, m, v = (torch.zeros_like(u) for _ in range(3))
    for first, last, by in step.spans:
        at = slice(first, last)
        if by.sign < 0:
            u[..., at].neg_()
        if by.l2:
            u[..., at].add_(dot.theta[..., at], alpha=by.l2)
        if by.beta2 is not None:
            moved = (2 * by.fresh) * step.u[at] * u[..., at]
            torch.add(moved, dot.v[..., at], alpha=by.beta2, out=v[..., at])
        if by.momentum:
            fresh = step.P[at] * u[..., at] if by.inside else u[..., at]
            torch.add(by.mu * dot.m[..., at], fresh, alpha=1 - by.tau, out=m[..., at])
        if by.inside:
            m[..., at].addcmul_(step.k[at], v[..., at])
        move = by.rate * by.a * m[..., at]
        if by.n:
            move.add_(u[..., at], alpha=by.rate * by.n)
        move = move if by.inside else move.mul_(step.P[at])
        torch.sub((1 - by.rate * by.decay) * dot.theta[..., at], move, out=theta[..., at])
        if by.beta2 is not None and not by.inside:
            theta[..., at].addcmul_(step.k[at], v[..., at])
    return State(theta, m, v)


def clipped(step: Update, g: Tensor) -> Tensor:
    """J g, the derivative of clipping in the direction g; J is symmetric."""
    if not step.slope:
        return step.clip * g
    return torch.addcmul(step.clip * g, (g @ step.g)[..., None], step.g, value=-step.slope)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of any shapes as one vector (n,)."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def split(x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The vector (n,) as tensors of these shapes."""
    return [part.view(shape) for part, shape in zip(x.split([math.prod(s) for s in shapes]), shapes, strict=True)]
