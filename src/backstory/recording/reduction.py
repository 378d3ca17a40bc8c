"""Is the declared `loss_reduction` the one that the training loss has?

Losses ℓ that the user passes as part of the graph show it: backward() gives ∂L/∂ℓ, the weight w of each sample. Weights other than
the declared ones are refused where that is certain: one backward pass, one factor for all samples, and another reduction that has
these weights. ℓ may be a sum over tokens where the declared reduction takes their mean, and the other way round.

Where no losses are passed, but the model's outputs go into a cross-entropy or BCE, its terms show the same (`loss_terms`).
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError
from .loss_terms import LossTerms
from .step import StepScope

UNEQUAL = (
    "the loss is the mean over all tokens of the batch, and its sequences have {least} to {most} of them, but loss_reduction='mean' takes all "
    "sequences for equal. Record with loss_reduction='token-mean', and pass tokens=(labels[:, 1:] != -100).sum(1) to rec.step() or s.batch()."
)
CLOSE = 0.02  # relative: half precision rounds by less, and reductions differ by a count


def check_reduction(scope: StepScope, scale: float) -> None:
    """Raise if backward weighted the losses of this step as another reduction does; `scale` is the loss scale."""
    seen = {slot: passes[0] for slot, passes in scope.loss_gradients.items() if len(passes) == 1}
    if not seen:
        return
    declared = scope.weights().split(scope.sizes)
    weights = torch.cat([declared[slot] for slot in seen])
    ratio = torch.cat([x.double().cpu().reshape(-1) for x in seen.values()]) / scale / weights
    weight, factor = float(weights[0]), float(ratio.median())
    if not _close(ratio, factor) or _close(ratio, 1.0) or _by_tokens(scope, list(seen), ratio):
        return
    if remedy := _remedy(scope, factor, factor * weight):
        raise UsageError(
            f"loss_reduction={scope.reduction!r} does not match the loss: in step {scope.number} backward() weighted the "
            f"samples' losses {factor:.4g} times as much as declared. {remedy}"
        )


def check_terms(scope: StepScope, scale: float, seen: Sequence[LossTerms]) -> None:
    """Raise, or warn, if the terms of the loss do not weigh what the declared reduction says."""
    count = torch.cat([x.number for x in seen])
    weight = torch.cat([x.weight for x in seen]) / scale
    ratio = weight / scope.weights()
    factor, total = float(ratio.median()), float(count.sum())
    by_token = _close(weight * total, 1.0)
    if _close(ratio, 1.0) or (scope.reduction != "token-mean" and _close(ratio * count, 1.0)):
        return
    if scope.reduction == "token-mean" and by_token:
        declared = sum(int(x.sum()) for x in scope.tokens if x is not None)
        raise UsageError(
            f"tokens= declares {declared} tokens with a loss in step {scope.number}, but the loss has {int(total)} terms. Count the positions "
            "that have a loss: for next-token prediction (labels[:, 1:] != -100).sum(1)."
        )
    if scope.reduction == "mean" and by_token:
        warnings.warn(UNEQUAL.format(least=int(count.min()), most=int(count.max())), stacklevel=2)
    elif _close(ratio, factor) and (remedy := _remedy(scope, factor, float(weight[0]))):
        raise UsageError(
            f"loss_reduction={scope.reduction!r} does not match the loss: in step {scope.number} the terms of the loss weigh {factor:.4g} "
            f"times as much as declared. {remedy}"
        )


def _by_tokens(scope: StepScope, slots: list[int], ratio: Tensor) -> bool:
    """Whether the losses are means over tokens where the reduction counts tokens, or sums where it does not."""
    known = [x for slot in slots if (x := scope.tokens[slot]) is not None]
    tokens = torch.cat(known).double() if len(known) == len(slots) else torch.zeros_like(ratio)
    return _close(ratio, tokens) if scope.reduction == "token-mean" else _close(ratio * tokens, 1.0)


def _remedy(scope: StepScope, factor: float, weight: float) -> str | None:
    """What to declare instead, or None where no reduction has these weights."""
    n, size, parts = len(scope.ids), scope.sizes[0], len(scope.sizes)
    tokens = sum(int(count.sum()) for count in scope.tokens if count is not None)
    if scope.reduction == "weights":
        certain = any(_near(factor, x) for count in (n, size, parts) for x in (count, 1 / count))
        return f"Pass weights= that are {factor:.4g} times as large." if certain else None
    for name, each in {"mean": 1 / n, "sum": 1.0, "token-mean": 1 / max(1, tokens)}.items():
        if name != scope.reduction and _near(weight, each):
            return f"Record with loss_reduction={name!r}, or change the loss."
    if parts > 1 and _near(weight, 1 / size):
        return f"Divide the mean of each micro-batch by {parts}, their number, or record with loss_reduction='weights'."
    return None


def _close(values: Tensor, to: Tensor | float) -> bool:
    return bool(((values - to).abs() <= CLOSE * values.abs()).all())


def _near(x: float, y: float) -> bool:
    return abs(x - y) <= CLOSE * y
