"""Whether a loss is the one of which a result is stored, by its value and its gradient's norm at the result's step, up to rounding."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..capture.precision import own_precision
from ..store import RunStore
from .gradients import blocks_of, in_query_mode

ROUNDING = {"float64": 1e-8, "float32": 1e-4}  # of a loss, relative; a hundredth of it where the loss is 0
COARSE = 2e-2  # of half precision
FEW = 8  # gradients of queries that are compared, each a backward pass


def rounding(precision: str) -> float:
    """The largest relative error that rounding explains."""
    return ROUNDING.get(precision, COARSE)


def same_loss(x: float, y: float, *precisions: str) -> bool:
    """Whether two values are of one loss, by the coarsest of the precisions in which they were computed."""
    return abs(x - y) <= max(map(rounding, precisions)) * (max(abs(x), abs(y)) + 0.01)


def same_slope(x: float, y: float, *precisions: str) -> bool:
    """The same for norms of gradients, which are compared relative to their size alone."""
    return abs(x - y) <= max(map(rounding, precisions)) * max(x, y)


def slopes(store: RunStore, model: nn.Module, losses: Callable[[], Tensor]) -> list[float]:
    """The norm of each of the first few losses' gradients, over the parameters that the run recorded."""
    parameters = [b.parameter for b in blocks_of(store, model).blocks]
    with in_query_mode(model, "eval", parameters), torch.enable_grad():
        return [_norm(x, parameters) for x in losses().reshape(-1)[:FEW]]


def _norm(loss: Tensor, parameters: Sequence[Tensor]) -> float:
    if not loss.requires_grad:
        return 0.0
    with own_precision(loss.device):
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return math.sqrt(sum(float(g.detach().double().square().sum()) for g in grads if g is not None))
