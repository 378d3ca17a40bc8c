r"""Agreement of scores with the truth, its bootstrap interval, and that of a paired difference.

    agreement = mean over the queries of spearman(score of each removal, its truth)          of one seed

With resampling counts c (how often each removal is drawn), the mid-rank of removal i is

    r_i = Σ_j c_j ([x_j < x_i] + ½ [x_j = x_i])

so that all resamples of one score take one matrix product, ties and repeats included; Spearman's correlation is Pearson's
of the ranks, weighted by c. An interval draws seeds with replacement, then removals within each seed, the same for all
queries and for both methods (paired): what would come out with other seeds and other removals. All sums are of whole
numbers (ranks times 2 and times n), exact up to a thousand removals: equal orders have equal correlations, on every processor.

Shapes:  n removals, Q queries, R resamples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backstory.exact.check import spearman as spearman

DRAWS = 1000


class Pair(NamedTuple):
    """Two predictions of the same removals of one seed, and the truth, (n,) or (n, Q) each."""

    truth: Tensor
    ours: Tensor
    theirs: Tensor


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def agreement(scores: Tensor, truth: Tensor) -> float:
    """Mean over the queries of the rank correlation."""
    return mean([spearman(x, y) for x, y in zip(_columns(scores), _columns(truth), strict=True)])


def interval(points: Sequence[tuple[Tensor, Tensor]], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float]:
    """`(lower, upper)` of the mean over seeds of agreement(scores, truth): the 95 % bootstrap interval."""
    g = torch.Generator().manual_seed(seed)
    total = draws * len(points)
    resampled = [_resampled(scores, truth, counts(len(truth), total, g)) for scores, truth in points]
    return bounds(torch.stack(resampled), g)


def difference(pairs: Sequence[Pair], *, draws: int = DRAWS, seed: int = 0) -> tuple[float, float, float]:
    """`(mean over seeds of agreement(ours) − agreement(theirs), lower, upper)`: the 95 % paired bootstrap interval."""
    g = torch.Generator().manual_seed(seed)
    resampled = [_differences(pair, draws * len(pairs), g) for pair in pairs]
    exact = mean([agreement(p.ours, p.truth) - agreement(p.theirs, p.truth) for p in pairs])
    return exact, *bounds(torch.stack(resampled), g)


def bounds(resampled: Tensor, g: torch.Generator) -> tuple[float, float]:
    """Quantiles of the mean of seeds drawn with replacement; `resampled` is (seeds, draws · seeds)."""
    count, total = resampled.shape
    chosen = torch.randint(count, (total,), generator=g)
    means = resampled.gather(0, chosen[None])[0].reshape(-1, count).mean(1)
    lower, upper = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return lower, upper


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


def _differences(pair: Pair, draws: int, g: torch.Generator) -> Tensor:
    """Differences of the two agreements in `draws` resamples of the removals, (draws,)."""
    C = counts(len(pair.truth), draws, g)
    return _resampled(pair.ours, pair.truth, C) - _resampled(pair.theirs, pair.truth, C)


def _resampled(scores: Tensor, truth: Tensor, C: Tensor) -> Tensor:
    """Agreements under resampling counts C (R, n): (R,)."""
    columns = zip(_columns(scores), _columns(truth), strict=True)
    return torch.stack([weighted(order(x), order(y), C) for x, y in columns]).mean(0)


def _columns(x: Tensor) -> Tensor:
    """(Q, n) of (n,) or (n, Q)."""
    return x.reshape(len(x), -1).T
