"""Reading a torch optimizer at the moment it steps: rates, momentum, decay, clipping.

Gradients are measured twice: when backward has added to them, and when the optimizer is about to use them.
The ratio is the clipping factor; anything but one factor for all parameters is refused.
Knows nothing of rows or files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedError, UsageError

OPTIMIZER_MODELS = ("auto", "sgd")


@dataclass(frozen=True)
class Reading:
    """One optimizer step in numbers; `groups` holds one list per coefficient, one entry per parameter group."""

    groups: dict[str, list[float]]
    clip: float
    norm: float
    squares: dict[int, float]  # id of parameter -> its share of ‖∇L‖², before clipping


class OptimizerReader:
    """Watches `optimizer` and the gradients of `model`; `reading` is set once the optimizer has stepped."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, model_as: str = "auto", scaler: Any = None) -> None:
        if model_as not in OPTIMIZER_MODELS:
            raise UsageError(f"found optimizer_model={model_as!r}; expected one of {', '.join(OPTIMIZER_MODELS)}.")
        self.optimizer, self.scaler, self.proxy = optimizer, scaler, model_as == "sgd"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.reading: Reading | None = None
        self.on_step: Callable[[Reading], None] = lambda reading: None
        self._scale = 1.0
        self._before: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        if not self.proxy:
            _check_modelled(optimizer)

    def attach(self) -> None:
        """Install the hooks."""
        for p in self.parameters:
            self._handles.append(p.register_post_accumulate_grad_hook(self._measure))
        self._handles.append(self.optimizer.register_step_pre_hook(self._read))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """A new step: forget what the last one left."""
        self.reading = None
        self._before.clear()
        self._scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    @property
    def loss_scale(self) -> float:
        """By how much the loss was multiplied before backward (1 without a GradScaler)."""
        return self._scale

    def _measure(self, p: Tensor) -> None:
        assert p.grad is not None
        self._before[id(p)] = _norm(p.grad)

    def _read(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.reading is not None:
            raise UsageError("optimizer.step() was called twice inside one rec.step(); give each update its own.")
        before, after = self._norms()
        clip, norm = _clip_factor(before, after)
        squares = {k: v**2 for k, v in before.items()}
        read = _proxy_group if self.proxy else _sgd_group
        rows = [read(optimizer, group) for group in optimizer.param_groups]
        groups = {name: [row[name] for row in rows] for name in rows[0]}
        reading = Reading(groups, clip, norm, squares)
        self.on_step(reading)
        self.reading = reading

    def _norms(self) -> tuple[dict[int, float], dict[int, float]]:
        """Gradient norms when backward was done (loss scale taken out) and now."""
        held = [p for p in self.parameters if p.grad is not None and id(p) in self._before]
        if not held:
            raise UsageError("optimizer.step() was called, but no backward pass ran inside this rec.step().")
        now = [_norm(p.grad) for p in held if p.grad is not None]
        numbers = torch.stack([self._before[id(p)] for p in held] + now).tolist()
        keys = [id(p) for p in held]
        before = dict(zip(keys, (x / self._scale for x in numbers[: len(held)]), strict=True))
        return before, dict(zip(keys, numbers[len(held) :], strict=True))


def _norm(grad: Tensor) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    wide = torch.promote_types(values.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return found.double()


def _clip_factor(before: dict[int, float], after: dict[int, float]) -> tuple[float, float]:
    """`(c, ‖∇L‖)`; c is exactly 1 where the gradients were left alone."""
    norm = sum(x * x for x in before.values()) ** 0.5
    if before == after or norm == 0:
        return 1.0, norm
    clip = sum(x * x for x in after.values()) ** 0.5 / norm
    odd = [k for k in before if abs(after[k] - clip * before[k]) > 1e-3 * clip * before[k] + 1e-6 * norm * clip]
    if odd or clip > 1 + 1e-4:
        raise UnsupportedError(
            "between backward and optimizer.step() the gradients were changed by something else than one factor ≤ 1 "
            f"for all parameters (overall {clip:.4g}). Modelled is torch.nn.utils.clip_grad_norm_ over all "
            "parameters; clipping by value or of some parameters only is not. With a GradScaler, pass scaler=."
        )
    return clip, norm


def _check_modelled(optimizer: Optimizer) -> None:
    if type(optimizer) is not SGD:
        raise UnsupportedError(
            f"the steps of {type(optimizer).__name__} are not modelled by this version; modelled is torch.optim.SGD "
            "(momentum, dampening, Nesterov, weight decay). Pass optimizer_model='sgd' to treat its steps as plain "
            "SGD steps, as the paper does; on AdamW runs that proxy has little correlation with the truth, and every "
            "answer will say that it was used."
        )
    if any(group["maximize"] for group in optimizer.param_groups):
        raise UnsupportedError("maximize=True is not modelled: negate the loss instead.")


def _sgd_group(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, float]:
    momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
    live = [p for p in group["params"] if p.grad is not None]
    idle = [p for p in group["params"] if p.grad is None and p.requires_grad]
    if idle and live and (momentum or group["weight_decay"]):
        raise UnsupportedError(
            f"{len(idle)} parameters of an optimizer group got no gradient in this step, so torch skips their momentum "
            "and decay; that is not modelled. Give them a group of their own with momentum=0 and weight_decay=0, "
            "or freeze them."
        )
    fresh = [optimizer.state[p].get("momentum_buffer") is None for p in live]
    if momentum and any(fresh) != all(fresh):
        raise UnsupportedError(
            "some parameters of an optimizer group have a momentum buffer and others do not yet; put parameters "
            "that join later into a group of their own."
        )
    dampening = float(group["dampening"]) if momentum and not (fresh and fresh[0]) else 0.0
    return {
        "rate": float(group["lr"]),
        "l2": float(group["weight_decay"]),
        "decay": 0.0,
        "momentum": momentum,
        "tau": dampening,
        "a": momentum if nesterov else 1.0,
        "n": 1.0 if nesterov else 0.0,
    }


def _proxy_group(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, float]:
    return {
        "rate": float(group["lr"]),
        "l2": 0.0,
        "decay": 0.0,
        "momentum": 0.0,
        "tau": 0.0,
        "a": 1.0,
        "n": 0.0,
    }
