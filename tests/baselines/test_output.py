"""Curvature of the loss in the output, against closed forms and autograd's Hessian."""

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import Batch, cross_entropy, data, mlp
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.output import output_factors, output_loss
from backstory.errors import UsageError


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
    with pytest.raises(UsageError, match="one loss for each row"):
        output_factors(mlp(), lambda m, b: cross_entropy(m, b).mean(), data(4))


def test_too_many_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstory.baselines.output.MOST_OUTPUTS", 2)
    with pytest.raises(UsageError, match="hessian='fisher'"):
        output_factors(mlp(), cross_entropy, data(4))
