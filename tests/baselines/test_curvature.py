"""Output curvature against torch.func, and scores through an inverse against the dense inverse."""

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import Batch, cross_entropy, data, mlp
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.curvature import (
    by_moment,
    by_other_rows,
    by_rows,
    moment,
    output_factors,
    output_loss,
    products,
)
from backstory.errors import NumericalError, UsageError


def test_cross_entropy_has_its_textbook_curvature() -> None:
    model, (x, y) = mlp(), data(6)
    U = output_factors(model, cross_entropy, (x, y))
    p = model(x).detach().softmax(1)
    assert_close(U @ U.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], 1e-9)


def test_squared_error_and_binary_cross_entropy() -> None:
    x, y = data(6)
    t = F.one_hot(y, 3).double()

    def squared(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), t, reduction="none").sum(1)

    def binary(model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), t, reduction="none").sum(1)

    U = output_factors(mlp(), squared, (x, y))
    assert_close(U @ U.mT, 2 * torch.eye(3, dtype=torch.float64).expand(6, 3, 3), 1e-12)
    U, s = output_factors(mlp(), binary, (x, y)), mlp()(x).detach().sigmoid()
    assert_close(U @ U.mT, torch.diag_embed(s * (1 - s)), 1e-12)


def test_a_linear_loss_has_none() -> None:
    def first(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch[0])[:, 0]
        return out

    assert not bool(output_factors(mlp(), first, data(4)).any())


def test_pulled_back_losses_are_products_with_the_output() -> None:
    model, (x, y) = mlp(), data(4)
    u = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    assert_close(output_loss(cross_entropy, u)(model, (x, y)), (model(x) * u).sum(1), 1e-12)
    assert not model._forward_hooks


def test_a_model_called_twice_is_refused() -> None:
    def twice(model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model, batch) + cross_entropy(model, batch)

    with pytest.raises(UsageError, match="2 times"):
        output_factors(mlp(), twice, data(4))
    with pytest.raises(UsageError, match="one value per sample"):
        output_factors(mlp(), lambda m, b: cross_entropy(m, b).mean(), data(4))


def test_too_many_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstory.baselines.curvature.MOST_OUTPUTS", 2)
    with pytest.raises(UsageError, match="hessian='fisher'"):
        output_factors(mlp(), cross_entropy, data(4))


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
    monkeypatch.setattr("backstory.baselines.curvature.CHUNK", 3)
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
