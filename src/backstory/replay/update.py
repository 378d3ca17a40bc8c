r"""One optimizer update as a differentiable function of θ, m, v and the gradient, as torch.optim takes it.

    g ← c g,  c = min(1, max_norm / (‖g‖ + 1e-6))        the norm over all parameters
    u  = ±g + λ θ                                         − where the loss is maximized
    m' = μ m + (1−τ) u                                    RMSprop: μ m + P u
    v' = β₂ v + f u²                                      f = 1−β₂; Adagrad: β₂ = f = 1
    θ' = (1 − η λ') θ − η P (a m' + n u)                  P = 1, or 1/(√(v'/(1−β₂^s)) + ε);  RMSprop: η m'

SGD without momentum keeps no m (a = 0, n = 1), with momentum a = 1, Nesterov a = μ and n = 1; Adam a = 1/(1−β₁^s); RAdam the same times
its rectification, and P = 1 before that acts; NAdam's a and n follow its schedule of momentum; Adagrad n = 1/(1 + (s−1) κ).

Written from torch's documentation, apart from `capture.optimizers`: an oracle of what that table reads.
Shapes:  parameters keep their shapes; with lead = 1 all tensors have R replicas in front.
"""

import math
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop


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
    fresh: float = 0.0  # f, the weight of u² in v'
    scaled: bool = True  # whether v, where it is kept, acts
    inside: bool = False  # whether P stands inside m
    sign: float = 1.0  # −1 where the loss is maximized


class Slots(NamedTuple):
    """The state of training, one tensor for each parameter; a scalar 0 where the optimizer keeps no m or v."""

    theta: tuple[Tensor, ...]
    m: tuple[Tensor, ...]
    v: tuple[Tensor, ...]


def kind_of(optimizer: Optimizer) -> type[Optimizer] | None:
    """The torch optimizer whose steps it takes: its own type, or the one that it inherits `step` from."""
    own = type(optimizer)
    parent = next((kind for kind in own.__mro__ if kind in READERS), None)
    return parent if parent is not None and unwrap(own.step) is unwrap(parent.step) else None


def obstacle(optimizer: Optimizer) -> str | None:
    """Why the optimizer's steps cannot be written as above, or None."""
    if kind_of(optimizer) is None:
        return f"{type(optimizer).__name__} is not supported ({', '.join(kind.__name__ for kind in READERS)} are)"
    groups = optimizer.param_groups
    if any(group.get("amsgrad") for group in groups):
        return "AMSGrad is not supported"
    if any(group.get("centered") for group in groups):
        return "RMSprop with centered=True is not supported"
    return None


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters in the order of all tuples here."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def coefficients(optimizer: Optimizer) -> tuple[Coefficients, ...]:
    """Of the update that the optimizer is about to take, one for each parameter."""
    kind = kind_of(optimizer)
    assert kind is not None
    read = READERS[kind].read
    return tuple(
        read(optimizer, group, optimizer.state.get(p, {}))._replace(sign=-1.0 if group.get("maximize") else 1.0)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )


def slots(optimizer: Optimizer, *, copy: bool = True) -> Slots:
    """Detached copies of θ, m and v; without `copy` the optimizer's own tensors, which its next step changes."""
    kind = kind_of(optimizer)
    assert kind is not None
    names = READERS[kind].m, READERS[kind].v
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

    second = [bool(names[1])] * len(parameters)
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
    u = g if c.sign > 0 else -g
    u = u + c.l2 * theta if c.l2 else u
    below: Tensor | float = 1.0  # 1/P
    if c.beta2 is not None:
        v = torch.addcmul(c.beta2 * v, u, u, value=c.fresh)
        below = _root(v / c.root) + c.eps if c.scaled else 1.0
    if c.momentum:
        m = torch.add(c.mu * m, u / below if c.inside else u, alpha=1 - c.tau)
    move = c.a * m if c.a else torch.zeros_like(u)
    move = move + c.n * u if c.n else move
    if c.beta2 is not None and not c.inside:
        move = move / below
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
        fresh=1 - beta2,
    )


def _nadam(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Coefficients:
    """Its momentum grows with the step; the products of all of them are the bias corrections."""
    s, beta1, psi = int(state.get("step", 0)) + 1, float(group["betas"][0]), float(group["momentum_decay"])
    mu, mu_next = (beta1 * (1 - 0.96 ** (step * psi) / 2) for step in (s, s + 1))
    product = (mu * state.get("mu_product", torch.ones(()))).item()  # kept in float32
    adam = _adam(optimizer, group, state)
    return adam._replace(a=mu_next / (1 - mu_next * product), n=(1 - mu) / (1 - product))


def _radam(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Coefficients:
    """Once the variance of 1/√v̂ is finite enough, Adam with a smaller step and ε before the correction; until then momentum alone."""
    s, beta2 = int(state.get("step", 0)) + 1, float(group["betas"][1])
    adam, end = _adam(optimizer, group, state), 2 / (1 - beta2) - 1
    rho = end - 2 * s * beta2**s / (1 - beta2**s)
    if rho <= 5:
        return adam._replace(scaled=False)
    rectified = math.sqrt((rho - 4) * (rho - 2) * end / ((end - 4) * (end - 2) * rho))
    return adam._replace(a=adam.a * rectified, eps=adam.eps / math.sqrt(adam.root))


def _rmsprop(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Coefficients:
    mu, alpha = float(group["momentum"]), float(group["alpha"])
    plain = Coefficients(
        rate=float(group["lr"]),
        l2=float(group["weight_decay"]),
        beta2=alpha,
        eps=float(group["eps"]),
        fresh=1 - alpha,
    )
    return plain._replace(momentum=True, mu=mu, a=1.0, n=0.0, inside=True) if mu > 0 else plain


def _adagrad(optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any]) -> Coefficients:
    slower = 1 + float(state.get("step", 0)) * float(group["lr_decay"])
    return Coefficients(
        rate=float(group["lr"]),
        l2=float(group["weight_decay"]),
        n=1 / slower,
        beta2=1.0,
        eps=float(group["eps"]),
        fresh=1.0,
    )


class Reader(NamedTuple):
    """How an optimizer's coefficients are read, and what it calls m and v."""

    read: Callable[[Optimizer, dict[str, Any], dict[str, Any]], Coefficients]
    m: str
    v: str


READERS: dict[type[Optimizer], Reader] = {
    SGD: Reader(_sgd, "momentum_buffer", ""),
    Adam: Reader(_adam, "exp_avg", "exp_avg_sq"),
    AdamW: Reader(_adam, "exp_avg", "exp_avg_sq"),
    NAdam: Reader(_nadam, "exp_avg", "exp_avg_sq"),
    RAdam: Reader(_radam, "exp_avg", "exp_avg_sq"),
    RMSprop: Reader(_rmsprop, "momentum_buffer", "square_avg"),
    Adagrad: Reader(_adagrad, "", "sum"),
}
