r"""How optimizers step, in numbers: one table from an optimizer's type to a reader of its coefficients.

    u = c g + λ θ                      the gradient, clipped by c, and an L2 term
    m ← μ m + (1−τ) u                  momentum
    θ ← (1 − η λ') θ − η P (a m + n u)       P = 1, or ω/(√(v/correction) + ε) by a second moment v

With `maximize` the loss is −L: g is its gradient. RMSprop with momentum has P inside: m ← μ m + P u, which is the same where P does not
change (`inside`). Adafactor's step is relative to the size of its weights, and bounded: ω of each parameter, frozen as P is.

A reader is called once per parameter group, right before the update. Types are matched by `isinstance`; a subclass that
overrides `step` must be registered. Recording, plans and runs from checkpoints use this
table. `replay.update` is written from torch's documentation on its own, as the oracle that recorded coefficients are tested against.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from ..errors import UnsupportedError, UsageError

Group = Mapping[str, Any]  # an entry of optimizer.param_groups


class StepCoefficients(NamedTuple):
    """What an optimizer does with one parameter group in one update; the defaults are plain SGD."""

    rate: float  # η
    l2: float = 0.0  # λ, inside the gradient
    decay: float = 0.0  # λ', decoupled
    momentum: float = 0.0  # μ
    tau: float = 0.0
    a: float = 1.0
    n: float = 0.0


class SecondMoment(NamedTuple):
    """P = 1/(√(v/correction) + ε) of one parameter, as the update that has just been taken used it."""

    v: Tensor
    eps: float
    correction: float
    steps: float  # over how many steps v is a mean, about


Reader = Callable[[Optimizer, Group], StepCoefficients]
SecondReader = Callable[[Optimizer, Group, Tensor], SecondMoment]
OwnRate = Callable[[Optimizer, Group, Tensor], float]


class OptimizerRule(NamedTuple):
    """A line of the table."""

    read: Reader
    second_moment: SecondReader | None = None
    own_rate: OwnRate | None = None  # ω of a parameter, as far as it is known right before the update
    inside: bool = False  # whether momentum, if there is any, averages P u


def read_sgd(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.SGD."""
    momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
    fresh = [optimizer.state.get(p, {}).get("momentum_buffer") is None for p in group["params"] if p.grad is not None]
    if momentum and any(fresh) != all(fresh):
        raise UnsupportedError(
            "only some parameters of an optimizer group have a momentum buffer. Put parameters that join later into "
            "their own group."
        )
    if not momentum and not all(fresh):
        raise UnsupportedError(
            "momentum was set to 0, but its buffers still hold an average of earlier gradients. That is not "
            "supported. Create a new optimizer without momentum instead."
        )
    first = bool(fresh) and fresh[0]  # torch then sets the buffer to the gradient, whatever came before
    return StepCoefficients(
        rate=float(group["lr"]),
        l2=float(group["weight_decay"]),
        momentum=0.0 if first else momentum,
        tau=float(group["dampening"]) if momentum and not first else 0.0,
        a=momentum if nesterov else 1.0,
        n=1.0 if nesterov else 0.0,
    )


def read_adam(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.Adam and AdamW."""
    beta, decay = float(group["betas"][0]), float(group["weight_decay"])
    step = _step(optimizer, group)
    decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay", False))
    return StepCoefficients(
        rate=float(group["lr"]),
        l2=0.0 if decoupled else decay,
        decay=decay if decoupled else 0.0,
        momentum=beta,
        tau=beta,
        a=1 / (1 - beta**step),
    )


def adam_second_moment(optimizer: Optimizer, group: Group, p: Tensor) -> SecondMoment:
    """v, or with AMSGrad its maximum."""
    state, beta = optimizer.state[p], group["betas"][1]
    v, step = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"], float(state["step"])
    return SecondMoment(v.detach(), float(group["eps"]), 1 - beta**step, _mean_over(step, beta))


def read_nadam(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.NAdam: μ_s = β₁ (1 − ½ 0.96^{s ψ}), a = μ_{s+1} / (1 − Π μ μ_{s+1}), n = (1 − μ_s) / (1 − Π μ)."""
    step, beta = _step(optimizer, group), float(group["betas"][0])
    now, then = (beta * (1 - 0.5 * 0.96 ** (s * float(group["momentum_decay"]))) for s in (step, step + 1))
    before = next((x["mu_product"] for x in _states(optimizer, group) if "mu_product" in x), torch.ones(()))
    product = float(before * now)  # in its own precision, as torch does
    return read_adam(optimizer, group)._replace(a=then / (1 - product * then), n=(1 - now) / (1 - product))


def read_radam(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.RAdam: Adam's a, times the rectification once it acts."""
    k = read_adam(optimizer, group)
    return k._replace(a=k.a * (_rectified(_step(optimizer, group), float(group["betas"][1])) or 1.0))


def radam_second_moment(optimizer: Optimizer, group: Group, p: Tensor) -> SecondMoment:
    """ε stands beside √v before its correction; P = 1 before the rectification acts."""
    moment = adam_second_moment(optimizer, group, p)
    if _rectified(float(optimizer.state[p]["step"]), float(group["betas"][1])) is None:
        return SecondMoment(torch.ones_like(moment.v), 0.0, 1.0, 1.0)
    return moment._replace(eps=moment.eps / moment.correction**0.5)


def read_rmsprop(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.RMSprop."""
    l2, momentum = float(group["weight_decay"]), float(group["momentum"])
    return StepCoefficients(rate=float(group["lr"]), l2=l2, momentum=momentum)


def rmsprop_second_moment(optimizer: Optimizer, group: Group, p: Tensor) -> SecondMoment:
    """v without a correction; where it is centered, the variance."""
    state = optimizer.state[p]
    v = state["square_avg"].detach()
    if group["centered"]:
        v = torch.addcmul(v, state["grad_avg"], state["grad_avg"], value=-1).clamp_min(0)
    return SecondMoment(v, float(group["eps"]), 1.0, _mean_over(float(state["step"]), float(group["alpha"])))


def read_adagrad(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.Adagrad."""
    slower = 1 + (_step(optimizer, group) - 1) * float(group["lr_decay"])
    return StepCoefficients(rate=float(group["lr"]), l2=float(group["weight_decay"]), a=1 / slower)


def adagrad_second_moment(optimizer: Optimizer, group: Group, p: Tensor) -> SecondMoment:
    """The sum of all squares."""
    state = optimizer.state[p]
    return SecondMoment(state["sum"].detach(), float(group["eps"]), 1.0, float(state["step"]))


def read_adafactor(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """torch.optim.Adafactor, whose decay is decoupled."""
    _step(optimizer, group)
    return StepCoefficients(rate=float(group["lr"]), decay=float(group["weight_decay"]))


def adafactor_own_rate(optimizer: Optimizer, group: Group, p: Tensor) -> float:
    """max(ε₂, RMS θ) min(η, 1/√s) / η, right before the update."""
    rate, size = float(group["lr"]), float(p.detach().norm()) / p.numel() ** 0.5
    return max(float(group["eps"][1]), size) * min(1.0, _step(optimizer, group) ** -0.5 / rate) if rate else 1.0


def adafactor_second_moment(optimizer: Optimizer, group: Group, p: Tensor) -> SecondMoment:
    """r cᵀ over the mean of r; the bound on the size of the update is a part of the correction."""
    state, least = optimizer.state[p], group["eps"][0]
    least = torch.finfo(p.dtype).eps if least is None else float(least)
    if (v := state.get("variance")) is None:
        rows = state["row_var"]
        v = rows @ state["col_var"] / rows.mean(dim=-2, keepdim=True).clamp(min=least)
    v = torch.where(v > 0, v.clamp(min=least**2), 0.0).detach()
    grad = torch.zeros_like(v) if p.grad is None else p.grad.detach()
    size = float((grad * v.clamp(min=least**2).rsqrt()).norm()) / (p.numel() ** 0.5 * float(group["d"]))
    bound = max(1.0, size)
    return SecondMoment(v, 0.0 if bool((v > 0).all()) else least * bound, bound**-2, 1.0)


def _states(optimizer: Optimizer, group: Group) -> list[Mapping[str, Any]]:
    """Of the parameters that have a gradient."""
    return [optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None]


def _step(optimizer: Optimizer, group: Group) -> float:
    """The number of the update that is about to be taken, by the optimizer's own count; the first is 1."""
    counts = {float(state.get("step", 0.0)) for state in _states(optimizer, group)}
    if len(counts) > 1:
        raise UnsupportedError(
            f"the parameters of an optimizer group have different step counts: {sorted(counts)}. Put parameters that "
            "join later into their own group."
        )
    return 1 + (counts.pop() if counts else 0.0)


def _mean_over(step: float, beta: float) -> float:
    """Over how many steps an average with decay β is a mean, about, after `step` of them."""
    return min(step, 1 / max(1e-9, 1 - beta))


def _rectified(step: float, beta: float) -> float | None:
    """RAdam's rectification of the variance at a step; None where it does not act yet."""
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * step * beta**step / (1 - beta**step)
    if length <= 5:
        return None
    return float(((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5)


def read_plain(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """Any optimizer as if it were plain SGD: the paper's proxy."""
    return StepCoefficients(rate=float(group["lr"]))


PLAIN = OptimizerRule(read_plain)
OPTIMIZERS: dict[type[Optimizer], OptimizerRule] = {
    SGD: OptimizerRule(read_sgd),
    Adam: OptimizerRule(read_adam, adam_second_moment),
    AdamW: OptimizerRule(read_adam, adam_second_moment),
    NAdam: OptimizerRule(read_nadam, adam_second_moment),
    RAdam: OptimizerRule(read_radam, radam_second_moment),
    RMSprop: OptimizerRule(read_rmsprop, rmsprop_second_moment, inside=True),
    Adagrad: OptimizerRule(read_adagrad, adagrad_second_moment),
    Adafactor: OptimizerRule(read_adafactor, adafactor_second_moment, adafactor_own_rate),
}
# what no diagonal can follow: a part of the name of the class, and why
NO_DIAGONAL = {
    "lion": "it steps by the sign of its momentum, whose derivative is 0 almost everywhere, so to first order no sample has an influence",
    "sign": "it steps by a sign, whose derivative is 0 almost everywhere, so to first order no sample has an influence",
    "rprop": "it steps by the sign of the gradient, whose derivative is 0 almost everywhere",
    "muon": "it orthogonalises each matrix's momentum, which mixes all entries: no learning rate of each parameter's own follows it",
    "lbfgs": "its direction comes from several evaluations and earlier steps, which no learning rate of each parameter's own follows",
}


def register_optimizer(
    kind: type[Optimizer], read: Reader | type[Optimizer], second_moment: SecondReader | None = None
) -> None:
    """Add an optimizer: `read(optimizer, group)` returns the `StepCoefficients` of the next update.

    If the optimizer divides by a second moment, `second_moment(optimizer, group, parameter)` returns a `SecondMoment`; it is
    called right after the update. A type in place of `read` means that `kind`, for example a subclass whose own `step` only adds
    logging, takes its steps and keeps its state as that type does.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(f"kind must be a subclass of torch.optim.Optimizer, got {kind!r}.")
    if not isinstance(read, type):
        OPTIMIZERS[kind] = OptimizerRule(read, second_moment)
    elif read in OPTIMIZERS:
        OPTIMIZERS[kind] = OPTIMIZERS[read]
    else:
        raise UsageError(f"{read.__name__} is not supported itself. Name one of {_names()}, or pass a function.")


def rule_of(optimizer: Optimizer) -> OptimizerRule | None:
    """The rule of the nearest type in the table, unless the optimizer's own type overrides `step`.

    torch wraps the `step` of a class, even an inherited one, when its first optimizer is created, so the wrapped functions are compared.
    """
    step = unwrap(type(optimizer).step)
    kind = next((kind for kind in type(optimizer).__mro__ if kind in OPTIMIZERS), None)
    return OPTIMIZERS[kind] if kind is not None and unwrap(kind.step) is step else None


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that takes the steps: that in a wrapper, such as Accelerate's."""
    if isinstance(optimizer, list | tuple):
        raise UsageError(
            "record() follows one optimizer, and takes what others train as frozen, which results say. Pass that of the parameters that matter, or "
            "put what several of one type train into parameter groups of one."
        )
    while isinstance(optimizer, Optimizer) and rule_of(optimizer) is None:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    return optimizer


def checked_rule(optimizer: Optimizer) -> OptimizerRule:
    """The same; raises where there is none."""
    if (rule := rule_of(optimizer)) is not None:
        return rule
    name = type(optimizer).__name__
    reason = next((why for part, why in NO_DIAGONAL.items() if part in name.lower()), None)
    parent = next((kind.__name__ for kind in type(optimizer).__mro__[1:] if kind in OPTIMIZERS), None)
    if reason is not None:
        raise UnsupportedError(
            f"{name} is not supported: {reason}. Train with one of {_names()}, or pass optimizer_model='sgd' to treat its steps as plain "
            "SGD, a poor proxy of which every result will carry a caveat. Training again without samples (run.leave_out) is right for any optimizer."
        )
    way = (
        f"It is a subclass of {parent} with a step() of its own. If that takes the steps of {parent}, say so with "
        f"backstory.register_optimizer({name}, torch.optim.{parent}). Else use"
        if parent is not None
        else "Use"
    )
    raise UnsupportedError(
        f"{name} is not supported. {way} one of {_names()}, add yours with "
        "backstory.register_optimizer, or pass optimizer_model='sgd' to treat its steps as plain SGD, as the paper "
        "does: for an adaptive optimizer that is a poor proxy, and every result will carry a caveat."
    )


def _names() -> str:
    return ", ".join(kind.__name__ for kind in OPTIMIZERS)


def group_of(optimizer: Optimizer, p: Tensor) -> Group:
    """The parameter's group."""
    group: Group = next(g for g in optimizer.param_groups if any(p is x for x in g["params"]))
    return group


def dropped(optimizer: Optimizer) -> list[str]:
    """What optimizer_model="sgd" drops of this optimizer's steps, in words; nothing where they are plain SGD steps."""
    rule, name = rule_of(optimizer), type(optimizer).__name__
    momentum = _values_of(optimizer, lambda g: g["betas"][0] if "betas" in g else g.get("momentum"))
    decay = _values_of(optimizer, lambda g: g.get("weight_decay"))
    nesterov = any(group.get("nesterov", False) for group in optimizer.param_groups)
    parts = [
        rule is None and f"{name}'s own update rule",
        rule is not None and rule.second_moment is not None and f"{name}'s second moment",
        momentum and f"momentum {momentum}",
        nesterov and "Nesterov",
        decay and f"weight decay {decay}",
    ]
    return [part for part in parts if part]


def listed(parts: Sequence[str]) -> str:
    """Parts in one phrase."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _values_of(optimizer: Optimizer, read: Callable[[dict[str, Any]], Any]) -> str:
    """A number of all parameter groups as text, a range where they differ; empty where it is 0 in all of them."""
    values = sorted({float(read(group) or 0.0) for group in optimizer.param_groups})
    return "" if values == [0.0] else f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
