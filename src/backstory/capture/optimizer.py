"""Reading a torch optimizer at the moment it steps: rates, momentum, decay, clipping, and after it Adam's second moment.

Gradients are measured twice: when backward has added to them, and when the optimizer is about to use them.
The ratio is the clipping factor; anything but one factor for all parameters is refused. Norms are compared at every step; largest
entries, which tell clipping by value that hardly moves a norm, of all parameters at first, later of one in turn.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import CoverageError, NumericalError, UnsupportedError, UsageError
from .hooks import backward_pass
from .optimizers import PLAIN, SecondMoment, checked_rule, dropped, group_of, listed

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
        self._rule = PLAIN if self.proxy else checked_rule(optimizer)
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
        return self._rule.second_moment is not None

    def second_moment(self, p: Tensor) -> SecondMoment:
        """Of a parameter, as the optimizer used it in the step that has just been taken."""
        assert self._rule.second_moment is not None
        return self._rule.second_moment(self.optimizer, group_of(self.optimizer, p), p)

    def moments_last(self, p: Tensor, share: float) -> int:
        """For how many steps v̂, a mean over some steps, changes by `share` of itself at most; 1 to 16."""
        return max(1, min(16, int(share * self.second_moment(p).steps)))

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
        self._refuse_idle(group)
        return self._rule.read(self.optimizer, group)._asdict()

    def _refuse_idle(self, group: dict[str, Any]) -> None:
        """torch leaves parameters without a gradient alone: their momentum and decay stand still."""
        idle = [p for p in group["params"] if p.grad is None and id(p) in self._recorded]
        moves = any(group.get(name) for name in ("momentum", "weight_decay", "betas")) or self.adaptive
        if idle and moves and not self.proxy:
            raise UnsupportedError(
                f"{len(idle)} parameters of an optimizer group got no gradient in this step, so torch skips their momentum "
                "and decay; that is not modelled. Freeze them before recording begins, give them a group of their own without "
                "momentum and decay, or let every parameter take part in the loss."
            )

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


def _refuse_maximize(optimizer: Optimizer) -> None:
    if any(group.get("maximize", False) for group in optimizer.param_groups):
        raise UnsupportedError("maximize=True is not modelled: negate the loss instead.")


def _moved(optimizer: Optimizer) -> Iterator[int]:
    """The parameters, by id, that the optimizer's next step moves."""
    for group in optimizer.param_groups:
        if float(group["lr"]) != 0:
            yield from (id(p) for p in group["params"] if p.grad is not None)


def _share(squares: Mapping[int, float], recorded: Collection[int]) -> float:
    total = sum(squares.values())
    return sum(x for k, x in squares.items() if k in recorded) / total if total else 1.0
