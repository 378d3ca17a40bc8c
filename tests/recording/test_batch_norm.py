"""BatchNorm in training mode: each row is the derivative by a copy of the weights that its sample has for itself."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.zoo.copies import own_copies
from tests.models.language import kept
from tests.support.loops import generator
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import UnsupportedError

D = torch.float64
SAMPLES = 5


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(27, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)).to(D)  # fmt: skip


def batch(seed: int) -> Tensor:
    return torch.randn(SAMPLES, 2, 5, 5, generator=generator(seed), dtype=D)


def losses(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out, torch.arange(len(out)) % 3, reduction="none")


def train(path: Path, model: nn.Module, steps: int = 2, **settings: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with backstory.record(
        model, optimizer, path, loss_reduction="mean", projection="full", encoding="float64", **settings
    ) as rec:
        for t in range(steps):
            optimizer.zero_grad()
            with rec.step([f"{t}-{z}" for z in range(SAMPLES)]):
                losses(model(batch(t)), {}).mean().backward()
                optimizer.step()


def test_rows_are_derivatives_by_own_copies_of_the_weights(tmp_path: Path) -> None:
    model = net()
    expected = own_copies(copy.deepcopy(model), {"input": batch(0)}, losses)
    train(tmp_path / "run", model)
    actual = kept(tmp_path / "run").rows[:SAMPLES]
    assert_close(actual, expected, 1e-9)
    parameters = list(net().parameters())
    apart = []
    for z in range(SAMPLES):
        twin = net()
        grads = torch.autograd.grad(losses(twin(batch(0)), {})[z], list(twin.parameters()))
        apart.append(torch.cat([g.flatten() for g in grads]))
    alone = torch.stack(apart)
    assert alone.shape[1] == sum(p.numel() for p in parameters)
    assert float((actual - alone).norm() / alone.norm()) > 0.05, (
        "samples do not mix in this model, so this test shows nothing"
    )
    assert_close(
        actual.sum(0, keepdim=True), alone.sum(0, keepdim=True), 1e-9, "the parts of all samples are the gradient"
    )


def test_the_result_says_that_samples_share_statistics(tmp_path: Path) -> None:
    model = net()
    train(tmp_path / "run", model, curvature="empirical")
    result = backstory.open(tmp_path / "run").query(model, lambda m: losses(m(batch(9)), {}))
    (caveat,) = [c for c in result.caveats if "shared statistics" in c]
    assert "3 BatchNorm layers, such as 1" in caveat
    still = net().eval()
    train(tmp_path / "eval", still, curvature="empirical")
    assert not any("shared statistics" in c for c in backstory.open(tmp_path / "eval").caveats())


class Scaled(nn.Module):
    """A bare parameter around a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm = nn.Parameter(torch.randn(3, 3)), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x @ self.matrix).tanh()
        return out


def test_a_bare_parameter_around_it_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), Scaled()).to(D)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(SAMPLES, 4, dtype=D)
    rec = backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean")
    with rec, pytest.raises(UnsupportedError, match="mixes the samples"), rec.step(range(SAMPLES)):
        losses(model(x), {}).mean().backward()
        optimizer.step()
