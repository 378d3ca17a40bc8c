r"""One update of a replay, in numbers that are read from torch's own optimizer.

    u       = ∇L + λ θ
    m       ← μ m + (1−τ) u
    θ       ← (1 − η λ') θ − η P (a m + n u)

| | μ | τ | a | n | P |
|---|---|---|---|---|---|
| SGD | 0 | 0 | 1 | 0 | 1 |
| SGD, momentum | μ | 0 at the first update, then dampening | 1 | 0 | 1 |
| SGD, Nesterov | μ | 0 | μ | 1 | 1 |
| AdamW | β1 | β1 | 1/(1−β1^s) | 0 | 1/(√v̂+ε) |

v̂ is read after the update. The factored P has r_i c_j / Σr in the place of v̂, with a matrix's row and column sums r and c; vectors keep
their own v̂. An update can be modelled as it was ("aware"), with the factored P ("factored"), or as the plain SGD step of the same rate
("proxy", what the paper does).

Assumes: one parameter group.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from backstory.errors import UsageError

Named = dict[str, Tensor]
MODELS = ("aware", "factored", "proxy")


class Update(NamedTuple):
    """The coefficients of one update."""

    rate: float  # η
    l2: float = 0.0  # λ
    decay: float = 0.0  # λ'
    momentum: float = 0.0  # μ
    tau: float = 0.0
    a: float = 1.0
    n: float = 0.0
    v: Named | None = None  # v̂ of each parameter; None: P = 1
    eps: float = 0.0

    @property
    def alpha(self) -> float:
        """α = η ((1−τ) a + n): the direct effect of the gradient on θ, but for P."""
        return self.rate * ((1 - self.tau) * self.a + self.n)

    @property
    def limit(self) -> float:
        """Curvature × η P at which θ begins to swing with growing amplitude: 2 for plain SGD, 2 (1+μ) for heavy ball."""
        return 2 * (1 + self.momentum) / (self.a * (1 - self.tau) + self.n * (1 + self.momentum))

    @property
    def plain(self) -> bool:
        """Whether it is θ ← θ − η ∇L."""
        return self.v is None and not any((self.l2, self.decay, self.momentum))

    def diagonal(self) -> Named | None:
        """P, or None where it is 1."""
        return None if self.v is None else {name: 1 / (v.sqrt() + self.eps) for name, v in self.v.items()}

    def modelled(self, model: str) -> "Update":
        """The update as it was, with its v̂ factored, or as a plain SGD step."""
        if model not in MODELS:
            raise UsageError(f"the model of an update must be one of {', '.join(MODELS)}, got {model!r}.")
        if model == "proxy":
            return Update(self.rate)
        if model == "factored" and self.v is not None:
            return self._replace(v={name: factored(v) for name, v in self.v.items()})
        return self


def factored(v: Tensor) -> Tensor:
    """r_i c_j / Σr of a matrix (a convolution's patches are its columns); a vector as it is."""
    if v.dim() < 2:
        return v
    r, c = v.flatten(1).sum(1), v.flatten(1).sum(0)
    return (torch.outer(r, c) / r.sum().clamp_min(torch.finfo(v.dtype).tiny)).reshape(v.shape)


def coefficients(optimizer: Optimizer) -> Update:
    """What the next update of the optimizer will be, but for v̂."""
    if len(optimizer.param_groups) != 1 or type(optimizer) not in (SGD, AdamW):
        raise UsageError(
            f"the optimizer must be SGD or AdamW with one parameter group, got {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)}."
        )
    group = optimizer.param_groups[0]
    state = optimizer.state.get(group["params"][0], {})
    return _sgd(group, state) if type(optimizer) is SGD else _adamw(group, state)


def second_moments(optimizer: Optimizer, model: nn.Module) -> Named | None:
    """v̂ of each parameter after an update; None for SGD."""
    if type(optimizer) is SGD:
        return None
    _, beta2 = optimizer.param_groups[0]["betas"]
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    return {name: s["exp_avg_sq"].detach() / (1 - beta2 ** float(s["step"])) for name, s in states.items()}


def _sgd(group: dict[str, Any], state: dict[str, Any]) -> Update:
    mu, nesterov = float(group["momentum"]), bool(group["nesterov"])
    first = state.get("momentum_buffer") is None
    return Update(
        rate=float(group["lr"]),
        l2=float(group["weight_decay"]),
        momentum=mu,
        tau=0.0 if first or not mu else float(group["dampening"]),
        a=mu if nesterov else 1.0,
        n=1.0 if nesterov else 0.0,
    )


def _adamw(group: dict[str, Any], state: dict[str, Any]) -> Update:
    if group["amsgrad"] or group["maximize"]:
        raise UsageError("AdamW must be used without amsgrad and maximize here.")
    beta1 = float(group["betas"][0])
    return Update(
        rate=float(group["lr"]),
        decay=float(group["weight_decay"]),
        momentum=beta1,
        tau=beta1,
        a=1 / (1 - beta1 ** (float(state.get("step", 0)) + 1)),
        eps=float(group["eps"]),
    )
