r"""The bootstrap of rank correlations, of their means and of paired differences.

With resampling counts c (how often each removal is drawn), the mid-rank of removal i is

    r_i = Σ_j c_j ([x_j < x_i] + ½ [x_j = x_i])

so that all resamples of one score take one matrix product, ties and repeats included; Spearman's correlation is Pearson's
of the ranks, weighted by c. An interval draws seeds with replacement, then removals within each seed, the same for
both methods (paired): what would come out with other seeds and other removals. All sums are of whole numbers (ranks times
2 and times n), exact up to a thousand removals: equal orders have equal correlations, on every processor.

Shapes:  n removals, R resamples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backstory.results.statistics import spearman

DRAWS = 1000
__all__ = ["DRAWS", "Pair", "bounds", "counts", "difference", "interval", "order", "spearman", "weighted"]


class Pair(NamedTuple):
    """Two predictions of the same removals of one seed, and the truth, (n,) each."""

    truth: Tensor
    ours: Tensor
    theirs: Tensor


def interval(scores: Sequence[tuple[Tensor, Tensor]], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """`(lower, upper)` of the mean over seeds of spearman(score, truth): the 95 % bootstrap interval."""
    g = torch.Generator().manual_seed(seed)

    def resample(score: Tensor, truth: Tensor) -> Tensor:
        return weighted(order(score), order(truth), counts(len(truth), draws * len(scores), g))

    return bounds(torch.stack([resample(*one) for one in scores]), g)


def difference(pairs: Sequence[Pair], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """`(mean over seeds of spearman(ours) − spearman(theirs), lower, upper)`: the 95 % paired bootstrap interval."""
    g = torch.Generator().manual_seed(seed)
    resampled = torch.stack([_differences(pair, draws * len(pairs), g) for pair in pairs])
    exact = sum(spearman(p.ours, p.truth) - spearman(p.theirs, p.truth) for p in pairs) / len(pairs)
    return exact, *bounds(resampled, g)


def bounds(resampled: Tensor, g: torch.Generator) -> tuple[float, float]:
    """Quantiles of the mean of seeds drawn with replacement; `resampled` is (seeds, draws · seeds)."""
    count, total = resampled.shape
    chosen = torch.randint(count, (total,), generator=g)
    means = resampled.gather(0, chosen[None])[0].reshape(-1, count).mean(1)
    lower, upper = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return lower, upper


def _differences(pair: Pair, draws: int, g: torch.Generator) -> Tensor:
    """Differences of the two correlations in `draws` resamples of the removals, (draws,)."""
    C, truth = counts(len(pair.truth), draws, g), order(pair.truth)
    return weighted(order(pair.ours), truth, C) - weighted(order(pair.theirs), truth, C)


def counts(n: int, draws: int, g: torch.Generator) -> Tensor:
    """How often each of n removals is drawn, (draws, n)."""
    picks = torch.randint(n, (draws, n), generator=g)
    return torch.zeros(draws, n, dtype=torch.float64).scatter_add_(1, picks, torch.ones(draws, n, dtype=torch.float64))


def order(x: Tensor) -> Tensor:
    """[x_j < x_i] + ½ [x_j = x_i], (n, n)."""
    return (x[None, :] < x[:, None]).double() + 0.5 * (x[None, :] == x[:, None]).double()


def weighted(X: Tensor, Y: Tensor, C: Tensor) -> Tensor:
    """Weighted correlations of the ranks, (R,)."""
    total = C.sum(1, keepdim=True)
    a, b = C @ (2 * X.T), C @ (2 * Y.T)  # (R, n)
    a = total * a - (C * a).sum(1, keepdim=True)
    b = total * b - (C * b).sum(1, keepdim=True)
    size = ((C * a * a).sum(1) * (C * b * b).sum(1)).sqrt()
    return (C * a * b).sum(1) / size.clamp_min(1)
