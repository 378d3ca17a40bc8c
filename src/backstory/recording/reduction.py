"""Is the declared `loss_reduction` the one that the training loss has?

Losses ℓ that the user passes as part of the graph show it: backward() gives ∂L/∂ℓ, which is the weight w of each sample. A factor between
these and the declared weights is refused only where it is certain: one backward pass, the same factor for all samples, and another
reduction that has exactly these weights. ℓ may also be a sum over tokens where the loss takes their mean, or their mean where it takes the sum.
"""

import torch
from torch import Tensor

from ..errors import UsageError
from .step import StepScope

CLOSE = 0.02  # relative: half precision rounds by less, and reductions differ by a count


def check_reduction(scope: StepScope, scale: float) -> None:
    """Raise if backward weighted the losses of this step as another reduction does; `scale` is the loss scale."""
    slots = [slot for slot, passes in scope.loss_gradients.items() if len(passes) == 1]
    if not slots:
        return
    declared = scope.weights().split(scope.sizes)
    weights, actual = (
        torch.cat(x)
        for x in zip(
            *((declared[s], scope.loss_gradients[s][0].double().cpu().reshape(-1)) for s in slots), strict=True
        )
    )
    ratio = actual / scale / weights
    factor = float(ratio.median())
    if not _close(ratio, factor) or _close(ratio, 1.0) or _by_tokens(scope, slots, ratio):
        return
    if remedy := _remedy(scope, factor, float(weights[0])):
        raise UsageError(
            f"loss_reduction={scope.reduction!r} does not match the loss: in step {scope.number} each sample's loss should "
            f"have the weight {weights[0]:.4g}, but backward() gave it {factor * weights[0]:.4g}, {factor:.4g} times as much. "
            f"{remedy}"
        )


def _by_tokens(scope: StepScope, slots: list[int], ratio: Tensor) -> bool:
    """Whether the losses were sums over tokens instead of means, or the other way round."""
    counts = [count for slot in slots if (count := scope.tokens[slot]) is not None]
    if len(counts) < len(slots):
        return False
    tokens = torch.cat(counts).double()
    return _close(ratio / tokens, 1.0) or _close(ratio * tokens, 1.0)


def _remedy(scope: StepScope, factor: float, weight: float) -> str | None:
    """What to declare instead, or None where no reduction has these weights."""
    n, size, parts = len(scope.ids), scope.sizes[0], len(scope.sizes)
    if scope.reduction == "weights":
        certain = any(_near(factor, x) for count in (n, size, parts) for x in (count, 1 / count))
        return f"Pass weights= that are {factor:.4g} times as large." if certain else None
    tokens = sum(int(count.sum()) for count in scope.tokens if count is not None)
    named = {"mean": 1 / n, "sum": 1.0, **({"token-mean": 1 / tokens} if tokens else {})}
    for name, each in named.items():
        if _near(factor * weight, each):
            return f"Record with loss_reduction={name!r}, or change the loss."
    if parts > 1 and _near(factor * weight, 1 / size):
        return f"Divide the mean of each micro-batch by {parts}, their number, or record with loss_reduction='weights'."
    return None


def _close(values: Tensor, to: float) -> bool:
    return bool(((values - to).abs() <= CLOSE * abs(to)).all())


def _near(x: float, y: float) -> bool:
    return abs(x - y) <= CLOSE * y
