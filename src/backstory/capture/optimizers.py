r"""How optimizers step, in numbers: one table from an optimizer's type to a reader of its coefficients.

    u = c g + λ θ                      the gradient, clipped by c, and an L2 term
    m ← μ m + (1−τ) u                  momentum
    θ ← (1 − η λ') θ − η P (a m + n u)       P = 1, or 1/(√(v/correction) + ε) by a second moment v

A reader is called once per parameter group, right before the update. Types are matched by `isinstance`; a subclass that
overrides `step` must be registered. Recording, plans and runs from checkpoints use this
table. `replay.update` is written from torch's documentation on its own, as the oracle that recorded coefficients are tested against.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

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


class OptimizerRule(NamedTuple):
    """A line of the table."""

    read: Reader
    second_moment: SecondReader | None = None


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
    counts = {float(optimizer.state.get(p, {}).get("step", 0.0)) for p in group["params"] if p.grad is not None}
    if len(counts) > 1:
        raise UnsupportedError(
            f"the parameters of an optimizer group have different step counts: {sorted(counts)}. Put parameters that "
            "join later into their own group."
        )
    step = 1 + (counts.pop() if counts else 0.0)
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
    v, step = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"], float(state["step"])
    return SecondMoment(v.detach(), float(group["eps"]), 1 - beta**step, min(step, 1 / max(1e-9, 1 - beta)))


def read_plain(optimizer: Optimizer, group: Group) -> StepCoefficients:
    """Any optimizer as if it were plain SGD: the paper's proxy."""
    return StepCoefficients(rate=float(group["lr"]))


PLAIN = OptimizerRule(read_plain)
OPTIMIZERS: dict[type[Optimizer], OptimizerRule] = {
    SGD: OptimizerRule(read_sgd),
    Adam: OptimizerRule(read_adam, adam_second_moment),
    AdamW: OptimizerRule(read_adam, adam_second_moment),
}


def register_optimizer(kind: type[Optimizer], read: Reader, second_moment: SecondReader | None = None) -> None:
    """Add an optimizer: `read(optimizer, group)` returns the `StepCoefficients` of the next update.

    If the optimizer divides by a second moment, `second_moment(optimizer, group, parameter)` returns a `SecondMoment`; it is
    called right after the update.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(f"kind must be a subclass of torch.optim.Optimizer, got {kind!r}.")
    OPTIMIZERS[kind] = OptimizerRule(read, second_moment)


def rule_of(optimizer: Optimizer) -> OptimizerRule | None:
    """The rule of the nearest type in the table, unless the optimizer's own type overrides `step`.

    torch wraps the `step` of a class, even an inherited one, when its first optimizer is created, so the wrapped functions are compared.
    """
    step = unwrap(type(optimizer).step)
    kind = next((kind for kind in type(optimizer).__mro__ if kind in OPTIMIZERS), None)
    return OPTIMIZERS[kind] if kind is not None and unwrap(kind.step) is step else None


def checked_rule(optimizer: Optimizer) -> OptimizerRule:
    """The same; raises where there is none."""
    if (rule := rule_of(optimizer)) is not None:
        return rule
    raise UnsupportedError(
        f"{type(optimizer).__name__} is not supported. Use one of {', '.join(k.__name__ for k in OPTIMIZERS)}, add yours with "
        "backstory.register_optimizer, or pass optimizer_model='sgd' to treat its steps as plain SGD, as the paper "
        "does: for an adaptive optimizer that is a poor proxy, and every result will carry a caveat."
    )


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
