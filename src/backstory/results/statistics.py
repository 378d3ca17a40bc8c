"""Spearman's rank correlation. Its sums are of whole numbers (ranks times 2 and times n): equal orders have equal correlations."""

import math

import torch
from torch import Tensor

from ..errors import NumericalError


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is constant."""
    if not bool((x.isfinite() & y.isfinite()).all()):
        raise NumericalError("scores and ground truth must be finite to be ranked, got NaN or Inf.")
    a, b = (len(r) * r - r.sum() for r in (_twice_ranks(x), _twice_ranks(y)))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else 0.0


def _twice_ranks(x: Tensor) -> Tensor:
    """Ranks (n,) times 2, equal values at the middle of theirs; by sorting, for any n."""
    _, where, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ranks: Tensor = (2 * counts.cumsum(0) - counts)[where].double()
    return ranks
