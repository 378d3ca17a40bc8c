"""Read a torch optimizer as it steps: learning rates, momentum, decay and clipping, and after the step Adam's second moment."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import CoverageError, UnsupportedError, UsageError, check_one_of
from .clipping import ClippingMeter
from .hooks import backward_pass
from .optimizers import PLAIN, SecondMoment, checked_rule, dropped, group_of, listed


@dataclass(frozen=True)
class Reading:
    """One optimizer step in numbers; `groups` holds one list per coefficient, one entry per parameter group."""

    groups: dict[str, list[float]]
    clip: float
    norm: float
    squares: dict[int, float]  # id of parameter -> its share of ‖∇L‖², before clipping
    updated: frozenset[int] = frozenset()  # ids of the parameters that the step moves: in a group whose rate is not 0
    sign: float = 1.0  # −1 where the optimizer maximizes: its loss is −L

    def share(self, recorded: Collection[int], *, updated: bool = False) -> float:
        """Of ‖∇L‖², what these parameters hold: over all that have a gradient, as clipping by norm is, or that the step moves."""
        squares = {k: x for k, x in self.squares.items() if not updated or k in self.updated}
        total = sum(squares.values())
        return sum(x for k, x in squares.items() if k in recorded) / total if total else 1.0


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
        check_one_of("optimizer_model", model_as, ("auto", "sgd"))
        self.optimizer, self.scaler, self.proxy = optimizer, scaler, model_as == "sgd"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._recorded = {id(p) for p in self.parameters}  # what torch updated when recording began
        self._clipping = ClippingMeter(self.parameters, clip_norm)
        self.reading: Reading | None = None
        self.watching = False  # inside a step
        self.on_step: Callable[[Reading], None] = lambda reading: None  # before the update
        self.on_stepped: Callable[[Reading], None] = lambda reading: None  # after it; gradients are still there
        self.loss_scale = 1.0  # by which the loss was multiplied before backward (1 without a GradScaler)
        self.passes: set[int] = set()  # the backward passes of this step that added to a gradient
        self._handles: list[RemovableHandle] = []
        self._rule = PLAIN if self.proxy else checked_rule(optimizer)
        self._own_rates: dict[int, float] = {}  # id of parameter -> ω, of the last update
        sign_of(optimizer)
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
        self._clipping.begin()
        self.passes = set()
        self.loss_scale = float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    @property
    def adaptive(self) -> bool:
        """Whether the optimizer divides by a second moment, and that is modelled."""
        return self._rule.second_moment is not None

    def second_moment(self, p: Tensor) -> SecondMoment:
        """Of a parameter, as the optimizer used it in the step that has just been taken."""
        assert self._rule.second_moment is not None
        moment = self._rule.second_moment(self.optimizer, group_of(self.optimizer, p), p)
        own = self._own_rates.get(id(p), 1.0)  # ω / (√(v/c) + ε) = 1 / (√(v/(c ω²)) + ε/ω)
        return moment if own == 1.0 else moment._replace(eps=moment.eps / own, correction=moment.correction * own**2)

    @property
    def foreseen(self) -> bool:
        """Whether the state of the optimizer alone tells its second moment, without an update."""
        return self._rule.own_rate is None

    @property
    def inside(self) -> bool:
        """Whether momentum averages what the second moment has scaled already."""
        return self._rule.inside

    def moments_last(self, p: Tensor, share: float) -> int:
        """For how many steps v̂, a mean over some steps, changes by `share` of itself at most; 1 to 16."""
        return max(1, min(16, int(share * self.second_moment(p).steps)))

    def _done(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.watching and self.reading is not None:
            self.on_stepped(self.reading)

    def _measure(self, p: Tensor) -> None:
        self.passes.add(backward_pass())
        self._clipping.measure(p)

    def _read(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.watching:
            raise UsageError(
                "optimizer.step() ran outside rec.step(), so the recording no longer matches the model. Put every "
                "update inside a rec.step(), or end the recording first."
            )
        if self.reading is not None:
            raise UsageError(
                "optimizer.step() was called twice inside one rec.step(). Give each update its own rec.step()."
            )
        _refuse_closure(args, kwargs)
        if _fused_skip(optimizer):
            return
        self._refuse_changes()
        clip, norm, squares = self._clipping.read(self.loss_scale)
        for group in optimizer.param_groups:
            self._refuse_idle(group)
        rows = [self._rule.read(optimizer, group)._asdict() for group in optimizer.param_groups]
        self._own_rates = self._read_own_rates(optimizer)
        groups = {name: [row[name] for row in rows] for name in rows[0]}
        moving = [p for group in optimizer.param_groups if float(group["lr"]) for p in group["params"]]
        updated = frozenset(id(p) for p in moving if p.grad is not None)
        reading = Reading(groups, clip, norm, squares, updated, sign_of(optimizer))
        self.on_step(reading)
        self.reading = reading

    def _read_own_rates(self, optimizer: Optimizer) -> dict[int, float]:
        if (own := self._rule.own_rate) is None:
            return {}
        pairs = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return {id(p): own(optimizer, group, p) for group, p in pairs}

    def _refuse_idle(self, group: dict[str, Any]) -> None:
        """torch leaves parameters without a gradient alone: their momentum and decay stand still."""
        idle = [p for p in group["params"] if p.grad is None and id(p) in self._recorded]
        moves = any(group.get(name) for name in ("momentum", "weight_decay", "betas")) or self.adaptive
        if idle and moves and not self.proxy:
            raise UnsupportedError(
                f"{len(idle)} parameters of an optimizer group got no gradient in this step, so torch skips their "
                "momentum and weight decay. That is not supported. Freeze them before recording, move them to a "
                "group without momentum and weight decay, or make sure that every parameter affects the loss."
            )

    def _refuse_changes(self) -> None:
        """Parameters and settings that were not there when recording began, and are not followed."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if new := [p for p in trained if id(p) not in self._recorded]:
            raise CoverageError(
                f"{len(new)} parameters (the first has shape {tuple(new[0].shape)}) are trained now, but were frozen "
                "when recording began. End this recording and start a new run from here."
            )
        if self._plain and (new := dropped(self.optimizer)):
            raise UnsupportedError(
                f"SGD was plain when recording began, but now has {listed(new)}, which optimizer_model='sgd' ignores. "
                "Record without optimizer_model= to follow SGD exactly."
            )


def _fused_skip(optimizer: Optimizer) -> bool:
    """Whether a GradScaler lets a fused optimizer step only to find Inf or NaN and do nothing."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UnsupportedError(
            "a fused optimizer unscales gradients inside its own step, where they cannot be measured. Call "
            "scaler.unscale_(optimizer) before scaler.step(optimizer), or use fused=False."
        )
    return bool(getattr(optimizer, "found_inf", False))


def _refuse_closure(args: Any, kwargs: Any) -> None:
    """torch's step hooks see `(optimizer, closure)`; a closure runs after them, so its gradients come too late."""
    if any(x is not None for x in (*args[1:2], kwargs.get("closure"))):
        raise UnsupportedError(
            "optimizer.step(closure) computes gradients inside the optimizer, too late to record them. Call "
            "loss.backward() first, then optimizer.step() without a closure."
        )


def sign_of(optimizer: Optimizer) -> float:
    """−1 where all parameter groups maximize, 1 where none does."""
    maximize = {bool(group.get("maximize", False)) for group in optimizer.param_groups}
    if len(maximize) > 1:
        raise UnsupportedError(
            "some parameter groups of the optimizer maximize the loss and others minimize it, so it has no loss of "
            "its own. Use one optimizer for each, or negate a part of the loss."
        )
    return -1.0 if maximize == {True} else 1.0
