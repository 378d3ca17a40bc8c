r"""Rank correlations and the paired bootstrap of their differences.

With resampling counts c (how often each removal is drawn), the mid-rank of removal i is

    r_i = Σ_j c_j ([x_j < x_i] + ½ [x_j = x_i])

so that all resamples of one score take one matrix product, ties and repeats included; Spearman's correlation is Pearson's
of the ranks, weighted by c. An interval draws seeds with replacement, then removals within each seed, the same for
both methods (paired): what would come out with other seeds and other removals.

Shapes:  n removals, R resamples.
Knows nothing of models or methods.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DRAWS = 1000


class Pair(NamedTuple):
    """Two predictions of the same removals of one seed, and the truth, (n,) each."""

    truth: Tensor
    ours: Tensor
    theirs: Tensor


def spearman(x: Tensor, y: Tensor) -> float:
    """Rank correlation, ties at their mean rank; 0 where one side is constant."""
    return float(_weighted(_order(x), _order(y), torch.ones(1, len(x), dtype=torch.float64))[0])


def difference(pairs: Sequence[Pair], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """`(mean over seeds of spearman(ours) − spearman(theirs), lower, upper)`: the 95 % paired bootstrap interval."""
    g = torch.Generator().manual_seed(seed)
    count = len(pairs)
    resampled = torch.stack([_differences(pair, draws * count, g) for pair in pairs])  # (seeds, draws · seeds)
    chosen = torch.randint(count, (draws * count,), generator=g)
    means = resampled.gather(0, chosen[None])[0].reshape(draws, count).mean(1)
    lower, upper = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    exact = sum(spearman(p.ours, p.truth) - spearman(p.theirs, p.truth) for p in pairs) / count
    return exact, lower, upper


def _differences(pair: Pair, draws: int, g: torch.Generator) -> Tensor:
    """Differences of the two correlations in `draws` resamples of the removals, (draws,)."""
    n = len(pair.truth)
    picks = torch.randint(n, (draws, n), generator=g)
    C = torch.zeros(draws, n, dtype=torch.float64).scatter_add_(1, picks, torch.ones(draws, n, dtype=torch.float64))
    truth = _order(pair.truth)
    return _weighted(_order(pair.ours), truth, C) - _weighted(_order(pair.theirs), truth, C)


def _order(x: Tensor) -> Tensor:
    """[x_j < x_i] + ½ [x_j = x_i], (n, n)."""
    return (x[None, :] < x[:, None]).double() + 0.5 * (x[None, :] == x[:, None]).double()


def _weighted(X: Tensor, Y: Tensor, C: Tensor) -> Tensor:
    """Weighted correlations of the ranks, (R,)."""
    total = C.sum(1, keepdim=True)
    a, b = C @ X.T, C @ Y.T  # (R, n)
    a = a - (C * a).sum(1, keepdim=True) / total
    b = b - (C * b).sum(1, keepdim=True) / total
    size = ((C * a * a).sum(1) * (C * b * b).sum(1)).sqrt()
    return torch.where(size > 1e-9, (C * a * b).sum(1) / size.clamp_min(1e-9), torch.zeros_like(size))
