"""Measure gradient clipping: gradients after the backward pass, and again right before the optimizer uses them.

The ratio is the clipping factor; anything but a single factor for all parameters is refused. Norms are compared at every step.
Largest entries, which reveal clipping by value that hardly changes a norm, are compared for all parameters at first, later for one
parameter per step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import NumericalError, UnsupportedError, UsageError

CHECK_EVERY = 100  # steps after which the largest entries of all gradients are looked at again, twice
Sizes = tuple[float, float]  # of one gradient: its norm, its largest entry


class ClippingMeter:
    """Measures the gradients of `parameters`; `clip_norm` is the max_norm that is known, or "varies"."""

    def __init__(self, parameters: Sequence[nn.Parameter], clip_norm: float | str | None) -> None:
        if isinstance(clip_norm, str) and clip_norm != "varies":
            raise UsageError(f"clip_norm must be a number, 'varies' or None, got {clip_norm!r}.")
        self._parameters, self._max_norm = parameters, clip_norm
        self._norms: dict[int, Tensor] = {}  # id of parameter -> its gradient's norm after backward
        self._largest: dict[int, Tensor] = {}  # likewise its largest entry, of those that are compared in a step
        self._compared: set[int] = set()
        self._steps = 0  # begun so far

    def begin(self) -> None:
        """A new step."""
        self._norms.clear()
        self._largest.clear()
        every, turn = self._steps % CHECK_EVERY < 2, self._steps % max(1, len(self._parameters))
        self._compared = {id(p) for p in (self._parameters if every else self._parameters[turn : turn + 1])}
        self._steps += 1

    def measure(self, p: Tensor) -> None:
        """A backward pass has added to the gradient of a parameter."""
        assert p.grad is not None
        self._norms[id(p)] = _norm(p.grad)
        if id(p) in self._compared:
            self._largest[id(p)] = _largest(p.grad)

    def read(self, scale: float) -> tuple[float, float, dict[int, float]]:
        """`(c, ‖∇L‖ before clipping, each parameter's share of its square)`, without the loss scale; right before the update."""
        grads = {id(p): p.grad for p in self._parameters if p.grad is not None and id(p) in self._norms}
        if not grads:
            raise UsageError(
                "optimizer.step() was called, but no backward pass ran inside this rec.step(). Call loss.backward() inside it too."
            )
        compared = [k for k in grads if k in self._largest]
        then = _numbers([*(self._norms[k] for k in grads), *(self._largest[k] for k in compared)])
        now = _numbers([*map(_norm, grads.values()), *(_largest(grads[k]) for k in compared)])
        before = _paired([*grads], compared, [x / scale for x in then])
        # two norms of the same gradient: the same sums, or a loss scale taken out
        rounding = 1e-5 if scale != 1 else 8 * max(torch.finfo(x.dtype).eps for x in self._norms.values())
        clip, norm = clip_factor(before, _paired([*grads], compared, now), rounding)
        self._check_norm(clip, norm)
        return clip, norm, {k: x**2 for k, (x, _) in before.items()}

    def _check_norm(self, clip: float, norm: float) -> None:
        """Clipping by norm leaves the same norm at every clipped step; another scaling of gradients does not."""
        if clip >= 1 or self._max_norm == "varies":
            return
        left = clip * (norm + 1e-6)
        if self._max_norm is None:
            self._max_norm = left
        if not isinstance(self._max_norm, str) and abs(left - self._max_norm) > 1e-3 * self._max_norm:
            raise UnsupportedError(
                f"gradients were clipped to norm {left:.4g} at one step and to {self._max_norm:.4g} at another. "
                "Backstory supports clip_grad_norm_ with a constant max_norm, not gradients that are rescaled by "
                "hand or clipped by another norm. If max_norm changes during training, pass clip_norm='varies'."
            )


def clip_factor(before: dict[int, Sizes], after: dict[int, Sizes], rounding: float) -> tuple[float, float]:
    """`(c, ‖∇L‖)`; c is exactly 1 where the gradients were left alone, up to `rounding`."""
    norm = sum(x * x for x, _ in before.values()) ** 0.5
    if not math.isfinite(norm):
        return 1.0, norm  # a row is not finite either, and the step is refused for that
    pairs = [(x, y) for k in before for x, y in zip(before[k], after[k], strict=True)]
    if norm == 0 or all(abs(y - x) <= rounding * x for x, y in pairs):
        return 1.0, norm
    clip = sum(x * x for x, _ in after.values()) ** 0.5 / norm
    if not math.isfinite(clip):
        raise NumericalError("NaN or Inf was written to .grad after backward(). The step was not recorded.")
    odd = [x for x, y in pairs if abs(y - clip * x) > 1e-3 * clip * x + 1e-6 * norm * clip]
    if odd or clip > 1 + 1e-4:
        raise UnsupportedError(
            "gradients were changed between backward() and optimizer.step(), and not by a single factor ≤ 1 (norm "
            f"after / norm before: {clip:.4g}). Use clip_grad_norm_ over all parameters, but not clipping by value "
            "or clipping only some parameters. If you use a GradScaler, pass scaler=."
        )
    return clip, norm


def _paired(keys: list[int], compared: list[int], sizes: list[float]) -> dict[int, Sizes]:
    """Norms of all, then largest entries of those that are compared, as pairs; 0 where an entry is not."""
    largest = dict(zip(compared, sizes[len(keys) :], strict=True))
    return {key: (norm, largest.get(key, 0.0)) for key, norm in zip(keys, sizes[: len(keys)], strict=True)}


def _numbers(values: list[Tensor]) -> list[float]:
    numbers: list[float] = torch.stack([x.double() for x in values]).tolist()
    return numbers


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
