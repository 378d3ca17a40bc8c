"""Curves of the experiments' pages."""

import numpy as np
import pytest
from experiments.plots import smooth


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_smoothing_keeps_length_level_and_gaps(n: int) -> None:
    y = np.full(n, 2.0)
    y[0] = np.nan
    actual = smooth(y)
    assert actual.shape == (n,)
    np.testing.assert_allclose(actual[np.isfinite(actual)], 2.0)
