"""Correlations against ranks counted one by one."""

import numpy as np
import pytest
import torch
from torch import Tensor

from backstory.errors import NumericalError
from backstory.exact.check import spearman


def draw(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counted(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation: each value's places in the sorted list, averaged."""
    ranks = []
    for values in (x.tolist(), y.tolist()):
        ordered = sorted(values)
        ranks.append([ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values])
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


def test_spearman_is_the_counted_one_with_ties_too() -> None:
    x, y = draw(50, 0), draw(50, 1)
    assert spearman(x, x + 0.7 * y) == pytest.approx(counted(x, x + 0.7 * y), abs=1e-12)
    a, b = (x * 2).round(), (x + y).round()
    assert spearman(a, b) == pytest.approx(counted(a, b), abs=1e-12)


def test_a_perfect_predictor_scores_1_and_a_constant_0() -> None:
    truth = draw(30, 0)
    assert spearman(truth.exp(), truth) == pytest.approx(1.0, abs=1e-12)
    assert spearman(-truth, truth) == pytest.approx(-1.0, abs=1e-12)
    assert spearman(torch.zeros(30, dtype=torch.float64), truth) == 0.0


def test_what_cannot_be_ranked_is_no_correlation() -> None:
    truth = draw(10, 0)
    for scores in (torch.full((10,), float("nan")), torch.where(truth > 0, truth, float("inf"))):
        with pytest.raises(NumericalError, match="must be finite"):
            spearman(scores, truth)
