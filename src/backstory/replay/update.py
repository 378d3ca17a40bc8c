r"""One optimizer update as a differentiable function of θ, m, v and the gradient, as torch.optim takes it.

    g ← c g,  c = min(1, max_norm / (‖g‖ + 1e-6))        the norm over all parameters
    u  = g + λ θ
    m' = μ m + (1−τ) u
    v' = β₂ v + (1−β₂) u²                                 Adam and AdamW
    θ' = (1 − η λ') θ − η P (a m' + n u)                  P = 1, or 1/(√(v'/(1−β₂^s)) + ε)

SGD without momentum keeps no m (a = 0, n = 1), with momentum a = 1, Nesterov a = μ and n = 1; Adam a = 1/(1−β₁^s).

Written from torch's documentation, apart from `capture.optimizers`: an oracle of what that table reads.
Shapes:  parameters keep their shapes; with lead = 1 all tensors have R replicas in front.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

MODELLED = (SGD, Adam, AdamW)


class Coefficients(NamedTuple):
    """What decides the update of one parameter at one step."""

    rate: float
    l2: float = 0.0
    decay: float = 0.0
    momentum: bool = False  # whether m is kept
    mu: float = 0.0
    tau: float = 0.0
    a: float = 0.0
    n: float = 1.0
    beta2: float | None = None  # None: no v, P = 1
    root: float = 1.0  # 1 − β₂^s
    eps: float = 0.0


class Slots(NamedTuple):
    """The state of training, one tensor for each parameter; a scalar 0 where the optimizer keeps no m or v."""

    theta: tuple[Tensor, ...]
    m: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


def obstacle(optimizer: Optimizer) -> str | None:
    """Why the optimizer's steps cannot be written as above, or None."""
    if type(optimizer) not in MODELLED:
        return f"{type(optimizer).__name__} is not supported (SGD, Adam and AdamW are)"
    groups = optimizer.param_groups
    if any(group.get("amsgrad") for group in groups):
        return "AMSGrad is not supported"
    if any(group.get("maximize") for group in groups):
        return "maximize=True is not supported: negate the loss instead"
    return None


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters in the order of all tuples here."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def coefficients(optimizer: Optimizer) -> tuple[Coefficients, ...]:
    """Of the update that the optimizer is about to take, one for each parameter."""
    read = _sgd if isinstance(optimizer, SGD) else _adam
    return tuple(
        read(optimizer, group, optimizer.state.get(p, {}))
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )


def slots(optimizer: Optimizer, *, copy: bool = True) -> Slots:
    """Detached copies of θ, m and v; without `copy` the optimizer's own tensors, which its next step changes."""
    names = ("momentum_buffer", "") if isinstance(optimizer, SGD) else ("exp_avg", "exp_avg_sq")
    first = [c.momentum for c in coefficients(optimizer)]
    parameters = trained_parameters(optimizer)

    def own(x: Tensor) -> Tensor:
        return x.detach().clone() if copy else x.detach()

    def read(name: str, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        states = [optimizer.state.get(p, {}).get(name) for p in parameters]
        return tuple(
            own(x) if x is not None else torch.zeros_like(p) if wants else p.new_zeros(())
            for x, p, wants in zip(states, (p.detach() for p in parameters), wanted, strict=True)
        )

    second = [not isinstance(optimizer, SGD)] * len(parameters)
    return Slots(tuple(map(own, parameters)), read(names[0], first), read(names[1], second))


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """‖a − b‖ over all tensors, in float64."""
    return math.sqrt(sum(float((x.detach() - y).double().square().sum()) for x, y in zip(a, b, strict=True)))


def update(
    now: Slots, grads: Sequence[Tensor], steps: Sequence[Coefficients], max_norm: float | None, lead: int = 0
) -> Slots:
    """The state after the step."""
    if max_norm is not None:
        grads = [g * c for g, c in zip(grads, _clip_factors(grads, max_norm, lead), strict=True)]
    moved = [_one(*args) for args in zip(now.theta, now.m, now.v, grads, steps, strict=True)]
    theta, m, v = zip(*moved, strict=True)
    return Slots(theta, m, v)


def _clip_factors(grads: Sequence[Tensor], max_norm: float, lead: int) -> list[Tensor]:
    """torch's clip_grad_norm_ over all parameters: one number for each replica, shaped to scale each of the gradients."""
    norms = torch.stack([torch.linalg.vector_norm(g.reshape(*g.shape[:lead], -1), dim=-1) for g in grads])
    c = torch.clamp(max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6), max=1.0)
    return [c.reshape(c.shape + (1,) * (g.dim() - lead)) for g in grads]


def _one(theta: Tensor, m: Tensor, v: Tensor, g: Tensor, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    u = g + c.l2 * theta if c.l2 else g
    if c.momentum:
        m = torch.add(c.mu * m, u, alpha=1 - c.tau)
    move = c.a * m if c.a else torch.zeros_like(u)
    move = move + c.n * u if c.n else move
    if c.beta2 is not None:
        v = torch.addcmul(c.beta2 * v, u, u, value=1 - c.beta2)
        move = move / (_root(v / c.root) + c.eps)
    return torch.sub((1 - c.rate * c.decay) * theta, move, alpha=c.rate), m, v


def _root(v: Tensor) -> Tensor:
    """√v with derivative 0 at 0: there m is 0 too, so that P's derivative never acts."""
    if not torch.is_grad_enabled():
        return v.sqrt()
    positive = v > 0
    return torch.where(positive, torch.where(positive, v, torch.ones_like(v)).sqrt(), torch.zeros_like(v))


def _sgd(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Coefficients:
    mu = float(group["momentum"])
    common = Coefficients(rate=float(group["lr"]), l2=float(group["weight_decay"]))
    if not mu:
        return common
    tau = 0.0 if state.get("momentum_buffer") is None else float(group["dampening"])
    a, n = (mu, 1.0) if group["nesterov"] else (1.0, 0.0)
    return common._replace(momentum=True, mu=mu, tau=tau, a=a, n=n)


def _adam(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Coefficients:
    beta1, beta2 = (float(b) for b in group["betas"])
    s = int(state.get("step", 0)) + 1
    decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
    weight_decay = float(group["weight_decay"])
    return Coefficients(
        rate=float(group["lr"]),
        l2=0.0 if decoupled else weight_decay,
        decay=weight_decay if decoupled else 0.0,
        momentum=True,
        mu=beta1,
        tau=beta1,
        a=1 / (1 - beta1**s),
        n=0.0,
        beta2=beta2,
        root=1 - beta2**s,
        eps=float(group["eps"]),
    )
