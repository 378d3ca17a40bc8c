"""Scores through an inverse: both sides against the dense inverse."""

import pytest
import torch
from tests.support.oracles import assert_close

from backstory.baselines.solve import by_moment, by_other_rows, by_rows, moment, products
from backstory.errors import NumericalError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "p"), [(9, 4), (4, 9), (6, 6)])
def test_either_side_is_the_dense_inverse(n: int, p: int) -> None:
    V, G, C = normal(3, p), normal(n, p, seed=1), normal(5, p, seed=2)
    eye = torch.eye(p, dtype=torch.float64)
    assert_close(by_rows(V, G, 0.3), V @ torch.linalg.inv(G.T @ G + 0.3 * eye) @ G.T, 1e-10)
    other = V @ torch.linalg.inv(C.T @ C + 0.3 * eye) @ G.T
    assert_close(by_moment(V, G, C.T @ C, 0.3), other, 1e-10)
    assert_close(by_other_rows(V, G, C, 0.3), other, 1e-10)


def test_chunks_and_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstory.baselines.solve.CHUNK", 3)
    A, B = normal(4, 10), normal(7, 10, seed=1)
    assert_close(products(A, B), A @ B.T, 1e-12)
    assert_close(moment(B), B.T @ B, 1e-12)
    assert products(A.float(), B.float()).dtype == torch.float64
    assert_close(by_rows(A.float(), B.float(), 0.5), by_rows(A, B, 0.5), 1e-5)


def test_a_singular_curvature_is_refused() -> None:
    V, G = normal(2, 4), normal(9, 4, seed=1)
    G[:, 3] = G[:, 0]
    with pytest.raises(NumericalError, match="damping"):
        by_rows(V, G, 0.0)
    with pytest.raises(NumericalError, match="rank="):
        by_rows(V, G[:3], 0.0)
    with pytest.raises(NumericalError, match="damping"):
        by_other_rows(V, G, G[:3], 0.0)
