"""Reading a torch optimizer at the moment it steps: rates, momentum, decay, clipping, and after it Adam's second moment.

Gradients are measured twice: when backward has added to them, and when the optimizer is about to use them.
The ratio is the clipping factor; anything but one factor for all parameters is refused. Norms are compared at every step; largest
entries, which tell clipping by value that hardly moves a norm, of all parameters at first, later of one in turn.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import CoverageError, NumericalError, UnsupportedError, UsageError
from .tap import backward_pass

OPTIMIZER_MODELS = ("auto", "sgd")
CHECK_EVERY = 100  # steps after which the largest entries of all gradients are looked at again, twice
Sizes = tuple[float, float]  # of one gradient: its norm, its largest entry


@dataclass(frozen=True)
class Reading:
    """One optimizer step in numbers; `groups` holds one list per coefficient, one entry per parameter group."""

    groups: dict[str, list[float]]
    clip: float
    norm: float
    squares: dict[int, float]  # id of parameter -> its share of ‖∇L‖², before clipping
    updated: frozenset[int] = frozenset()  # ids of the parameters that the step moves: in a group whose rate is not 0

    def share(self, recorded: Collection[int]) -> float:
        """Of ‖∇L‖², what these parameters hold; over all that have a gradient, as clipping by norm is."""
        return _share(self.squares, recorded)

    def coverage(self, recorded: Collection[int]) -> float:
        """Of the squared norm of the gradients that the step uses, what these parameters hold."""
        return _share({k: x for k, x in self.squares.items() if k in self.updated}, recorded)


class OptimizerReader:
    """Watches `optimizer` and the gradients of `model`; `reading` is set once the optimizer has stepped."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        model_as: str = "auto",
        scaler: Any = None,
        clip_norm: float | str | None = None,
    ) -> None:
        if model_as not in OPTIMIZER_MODELS:
            raise UsageError(f"found optimizer_model={model_as!r}; expected one of {', '.join(OPTIMIZER_MODELS)}.")
        self.optimizer, self.scaler, self.proxy = optimizer, scaler, model_as == "sgd"
        if isinstance(clip_norm, str) and clip_norm != "varies":
            raise UsageError(f"found clip_norm={clip_norm!r}; expected a number, 'varies', or nothing.")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._recorded = {id(p) for p in self.parameters}  # what torch updated when recording began
        self._max_norm = clip_norm
        self.reading: Reading | None = None
        self.watching = False  # inside a step
        self.on_step: Callable[[Reading], None] = lambda reading: None  # before the update
        self.on_stepped: Callable[[Reading], None] = lambda reading: None  # after it; gradients are still there
        self._scale = 1.0
        self._before: dict[int, Tensor] = {}  # id of parameter -> its gradient's norm
        self._largest: dict[int, Tensor] = {}  # likewise its largest entry, of those that are looked at in a step
        self._looked_at: set[int] = set()
        self.passes: set[int] = set()  # the backward passes of this step that added to a gradient
        self._steps = 0  # begun so far
        self._handles: list[RemovableHandle] = []
        if not self.proxy:
            _check_modelled(optimizer)
        _refuse_maximize(optimizer)
        self._plain = self.proxy and not dropped(optimizer)  # its own steps are the ones that are modelled

    def attach(self) -> None:
        """Install the hooks."""
        for p in self.parameters:
            self._handles.append(p.register_post_accumulate_grad_hook(self._measure))
        self._handles.append(self.optimizer.register_step_pre_hook(self._read))
        self._handles.append(self.optimizer.register_step_post_hook(self._done))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end(self) -> None:
        """The step is over: an update from here on is in no step."""
        self.watching = False

    def begin(self) -> None:
        """A new step: forget what the last one left."""
        self.watching = True
        self.reading = None
        self._before.clear()
        self._largest.clear()
        self.passes = set()
        every, turn = self._steps % CHECK_EVERY < 2, self._steps % max(1, len(self.parameters))
        self._looked_at = {id(p) for p in (self.parameters if every else self.parameters[turn : turn + 1])}
        self._steps += 1
        self._scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    @property
    def loss_scale(self) -> float:
        """By how much the loss was multiplied before backward (1 without a GradScaler)."""
        return self._scale

    @property
    def adaptive(self) -> bool:
        """Whether the optimizer divides by a second moment, and that is modelled."""
        return not self.proxy and type(self.optimizer) in (Adam, AdamW)

    def second_moment(self, p: Tensor) -> tuple[Tensor, float, float]:
        """`(v, ε, c)` with P = 1/(√(v/c) + ε), as Adam used them in the step that has just been taken."""
        group = next(g for g in self.optimizer.param_groups if any(p is x for x in g["params"]))
        state = self.optimizer.state[p]
        v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        return v.detach(), float(group["eps"]), 1 - group["betas"][1] ** float(state["step"])

    def moments_last(self, p: Tensor, share: float) -> int:
        """For how many steps v̂, a mean over the last 1/(1−β₂) steps or all there were, changes by `share` of itself at most; 1 to 16."""
        group = next(g for g in self.optimizer.param_groups if any(p is x for x in g["params"]))
        behind = min(float(self.optimizer.state[p]["step"]), 1 / max(1e-9, 1 - group["betas"][1]))
        return max(1, min(16, int(share * behind)))

    def _done(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.watching and self.reading is not None:
            self.on_stepped(self.reading)

    def _measure(self, p: Tensor) -> None:
        assert p.grad is not None
        self.passes.add(backward_pass())
        self._before[id(p)] = _norm(p.grad)
        if id(p) in self._looked_at:
            self._largest[id(p)] = _largest(p.grad)

    def _read(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.watching:
            raise UsageError(
                "optimizer.step() ran outside of rec.step(), so the model leaves the recorded run. Put every update inside "
                "a rec.step(), or end the recording first."
            )
        if self.reading is not None:
            raise UsageError("optimizer.step() was called twice inside one rec.step(); give each update its own.")
        _refuse_closure(args, kwargs)
        if _fused_skip(optimizer):
            return
        self._refuse_newcomers()
        self._refuse_changes()
        before, after = self._measured()
        clip, norm = _clip_factor(before, after, self._rounding())
        squares = {k: v[0] ** 2 for k, v in before.items()}
        self._check_clipping(clip, norm)
        rows = [self._group(group) for group in optimizer.param_groups]
        groups = {name: [row[name] for row in rows] for name in rows[0]}
        reading = Reading(groups, clip, norm, squares, frozenset(_moved(optimizer)))
        self.on_step(reading)
        self.reading = reading

    def _rounding(self) -> float:
        """How far two norms of the same gradient may lie apart, relatively: the same sums, or a loss scale taken out."""
        return 1e-5 if self._scale != 1 else 8 * max(torch.finfo(x.dtype).eps for x in self._before.values())

    def _check_clipping(self, clip: float, norm: float) -> None:
        """Clipping by norm leaves the same norm at every clipped step; another scaling of gradients does not."""
        if clip >= 1 or self._max_norm == "varies":
            return
        left = clip * (norm + 1e-6)
        if self._max_norm is None:
            self._max_norm = left
        if not isinstance(self._max_norm, str) and abs(left - self._max_norm) > 1e-3 * self._max_norm:
            raise UnsupportedError(
                f"gradients were scaled to the norm {left:.4g} at one step and {self._max_norm:.4g} at another. Clipping by "
                "norm leaves the same norm at every clipped step; a division of gradients by hand, or clipping by another "
                "norm, does not, and is not modelled. If max_norm itself changes during training, pass clip_norm='varies'."
            )

    def _group(self, group: dict[str, Any]) -> dict[str, float]:
        """One parameter group's coefficients, by name."""
        if self.proxy:
            return _proxy_group(group)
        return self._adam_group(group) if self.adaptive else self._sgd_group(group)

    def _adam_group(self, group: dict[str, Any]) -> dict[str, float]:
        beta, decay = float(group["betas"][0]), float(group["weight_decay"])
        live = [p for p in group["params"] if p.grad is not None]
        if idle := [p for p in group["params"] if p.grad is None and id(p) in self._recorded]:
            raise UnsupportedError(
                f"{len(idle)} parameters of an optimizer group got no gradient in this step, so torch skips their moments "
                "and decay; that is not modelled. Freeze them before recording begins, or let every parameter take part "
                "in the loss."
            )
        counts = {float(self.optimizer.state.get(p, {}).get("step", 0.0)) for p in live}
        if len(counts) > 1:
            raise UnsupportedError(
                f"the parameters of an optimizer group have taken {sorted(counts)} steps; put parameters that join later "
                "into a group of their own."
            )
        step = 1 + (counts.pop() if counts else 0.0)
        decoupled = type(self.optimizer) is AdamW or bool(group.get("decoupled_weight_decay", False))
        return {
            "rate": float(group["lr"]),
            "l2": 0.0 if decoupled else decay,
            "decay": decay if decoupled else 0.0,
            "momentum": beta,
            "tau": beta,
            "a": 1 / (1 - beta**step),
            "n": 0.0,
        }

    def _sgd_group(self, group: dict[str, Any]) -> dict[str, float]:
        momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
        live = [p for p in group["params"] if p.grad is not None]
        idle = [p for p in group["params"] if p.grad is None and id(p) in self._recorded]
        if idle and (momentum or group["weight_decay"]):
            raise UnsupportedError(
                f"{len(idle)} parameters of an optimizer group got no gradient in this step, so torch skips their momentum "
                "and decay; that is not modelled. Give them a group of their own with momentum=0 and weight_decay=0, "
                "or freeze them before recording begins."
            )
        fresh = [self.optimizer.state.get(p, {}).get("momentum_buffer") is None for p in live]
        if momentum and any(fresh) != all(fresh):
            raise UnsupportedError(
                "some parameters of an optimizer group have a momentum buffer and others do not yet; put parameters "
                "that join later into a group of their own."
            )
        if not momentum and not all(fresh):
            raise UnsupportedError(
                "momentum was switched off while its buffers hold an average of earlier gradients, which torch keeps for "
                "later; that is not modelled. Make a new optimizer without momentum instead."
            )
        first = bool(fresh) and fresh[0]  # torch then sets the buffer to the gradient, whatever came before
        return {
            "rate": float(group["lr"]),
            "l2": float(group["weight_decay"]),
            "decay": 0.0,
            "momentum": 0.0 if first else momentum,
            "tau": float(group["dampening"]) if momentum and not first else 0.0,
            "a": momentum if nesterov else 1.0,
            "n": 1.0 if nesterov else 0.0,
        }

    def _refuse_newcomers(self) -> None:
        known = {id(p) for p in self.parameters}
        new = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None and id(p) not in known]
        if new:
            raise CoverageError(
                f"{len(new)} parameters, the first of shape {tuple(new[0].shape)}, are trained now, but were frozen when "
                "recording began, so they have no rows. End this recording, and record from here on into a new run."
            )

    def _refuse_changes(self) -> None:
        """Settings that were not there when recording began, and are not followed."""
        _refuse_maximize(self.optimizer)
        if self._plain and (new := dropped(self.optimizer)):
            raise UnsupportedError(
                f"SGD was plain when recording began; now it has {listed(new)}, which optimizer_model='sgd' leaves out. Record "
                "without optimizer_model=: then SGD's steps are followed as they are."
            )

    def _measured(self) -> tuple[dict[int, Sizes], dict[int, Sizes]]:
        """Sizes of the gradients when backward was done (loss scale taken out) and now."""
        held = {id(p): p.grad for p in self.parameters if p.grad is not None and id(p) in self._before}
        if not held:
            raise UsageError("optimizer.step() was called, but no backward pass ran inside this rec.step().")
        looked = [k for k in held if k in self._largest]
        then = _numbers([*(self._before[k] for k in held), *(self._largest[k] for k in looked)])
        now = _numbers([*map(_norm, held.values()), *(_largest(held[k]) for k in looked)])
        return _paired([*held], looked, [x / self._scale for x in then]), _paired([*held], looked, now)


def _paired(keys: list[int], looked: list[int], sizes: list[float]) -> dict[int, Sizes]:
    """Norms of all, then largest entries of those that were looked at, as pairs; 0 where an entry was not."""
    largest = dict(zip(looked, sizes[len(keys) :], strict=True))
    return {key: (norm, largest.get(key, 0.0)) for key, norm in zip(keys, sizes[: len(keys)], strict=True)}


def _numbers(values: list[Tensor]) -> list[float]:
    found: list[float] = torch.stack([x.double() for x in values]).tolist()
    return found


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _largest(grad: Tensor) -> Tensor:
    """The largest entry: clipping by value changes it by another factor than the norm."""
    values = _values(grad)
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    least, most = torch.aminmax(values)  # the norm of order ∞ is ten times slower on a CPU
    return torch.maximum(-least, most)


def _norm(grad: Tensor) -> Tensor:
    values = _values(grad)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm


def _clip_factor(before: dict[int, Sizes], after: dict[int, Sizes], rounding: float) -> tuple[float, float]:
    """`(c, ‖∇L‖)`; c is exactly 1 where the gradients were left alone, up to `rounding`."""
    norm = sum(x * x for x, _ in before.values()) ** 0.5
    if not math.isfinite(norm):
        return 1.0, norm  # a row is not finite either, and the step is refused for that
    pairs = [(x, y) for k in before for x, y in zip(before[k], after[k], strict=True)]
    if norm == 0 or all(abs(y - x) <= rounding * x for x, y in pairs):
        return 1.0, norm
    clip = sum(x * x for x, _ in after.values()) ** 0.5 / norm
    if not math.isfinite(clip):
        raise NumericalError("something wrote NaN or Inf to .grad after backward. The step was not recorded.")
    odd = [x for x, y in pairs if abs(y - clip * x) > 1e-3 * clip * x + 1e-6 * norm * clip]
    if odd or clip > 1 + 1e-4:
        raise UnsupportedError(
            "between backward and optimizer.step() the gradients were changed by something else than one factor ≤ 1 "
            f"for all parameters (overall {clip:.4g}). Modelled is torch.nn.utils.clip_grad_norm_ over all "
            "parameters; clipping by value or of some parameters only is not. With a GradScaler, pass scaler=."
        )
    return clip, norm


def _fused_skip(optimizer: Optimizer) -> bool:
    """Whether a GradScaler lets a fused optimizer step only to find Inf or NaN and do nothing."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UnsupportedError(
            "a fused optimizer takes the loss scale out of the gradients inside its own step, where they cannot be "
            "measured. Call scaler.unscale_(optimizer) before scaler.step(optimizer), or use fused=False."
        )
    return bool(getattr(optimizer, "found_inf", False))


def _refuse_closure(args: Any, kwargs: Any) -> None:
    """torch's step hooks see `(optimizer, closure)`; a closure runs after them, so its gradients come too late."""
    if any(x is not None for x in (*args[1:2], kwargs.get("closure"))):
        raise UnsupportedError(
            "optimizer.step(closure) computes the gradients inside the optimizer, after they were to be read. Call "
            "loss.backward() first, and then optimizer.step() without a closure."
        )


def _check_modelled(optimizer: Optimizer) -> None:
    if type(optimizer) not in (SGD, Adam, AdamW):
        raise UnsupportedError(
            f"the steps of {type(optimizer).__name__} are not modelled; modelled are torch.optim's SGD (momentum, "
            "dampening, Nesterov, weight decay), Adam and AdamW. Pass optimizer_model='sgd' to treat its steps as plain "
            "SGD steps, as the paper does; with an adaptive optimizer that proxy has little correlation with the truth, "
            "and every answer will say that it was used."
        )


def _refuse_maximize(optimizer: Optimizer) -> None:
    if any(group.get("maximize", False) for group in optimizer.param_groups):
        raise UnsupportedError("maximize=True is not modelled: negate the loss instead.")


def dropped(optimizer: Optimizer) -> list[str]:
    """What optimizer_model="sgd" drops of this optimizer's steps, in words; nothing where they are plain SGD steps."""
    momentum = _values_of(optimizer, lambda g: g["betas"][0] if "betas" in g else g.get("momentum"))
    decay = _values_of(optimizer, lambda g: g.get("weight_decay"))
    nesterov = any(group.get("nesterov", False) for group in optimizer.param_groups)
    second = ["Adam's second moment"] if type(optimizer) in (Adam, AdamW) else []
    own = [] if type(optimizer) in (SGD, Adam, AdamW) else [f"{type(optimizer).__name__}'s own way of stepping"]
    parts = [
        *second,
        *own,
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
    found = sorted({float(read(group) or 0.0) for group in optimizer.param_groups})
    return "" if found == [0.0] else f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"


def _moved(optimizer: Optimizer) -> Iterator[int]:
    """The parameters, by id, that the optimizer's next step moves."""
    for group in optimizer.param_groups:
        if float(group["lr"]) != 0:
            yield from (id(p) for p in group["params"] if p.grad is not None)


def _share(squares: Mapping[int, float], recorded: Collection[int]) -> float:
    total = sum(squares.values())
    return sum(x for k, x in squares.items() if k in recorded) / total if total else 1.0


def _proxy_group(group: dict[str, Any]) -> dict[str, float]:
    return {
        "rate": float(group["lr"]),
        "l2": 0.0,
        "decay": 0.0,
        "momentum": 0.0,
        "tau": 0.0,
        "a": 1.0,
        "n": 0.0,
    }
