"""Removing a sample everywhere: on a linear model with squared error the corrected sum is retraining, exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.maths.steps import Contraction

D = torch.float64
ORDER = [[0, 1, 2], [3, 4, 0], [1, 5, 2], [0, 3, 2], [4, 1, 0]]  # 5 occurs once


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, generator=g, dtype=D), torch.randn(6, 1, generator=g, dtype=D)


def train(settings: dict[str, Any], without: int | None = None, path: Path | None = None) -> nn.Module:
    """Five steps; `without` has weight 0 wherever it occurs."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    x, y = data()

    def losses(ids: list[int], out: Tensor) -> Tensor:
        keep = torch.tensor([float(i != without) for i in ids], dtype=D)
        return ((out - y[ids]).square().sum(1) * keep).sum() / len(ids)

    if path is None:
        for ids in ORDER:
            losses(ids, model(x[ids])).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model
    with backstory.record(
        model, optimizer, path, loss_reduction="mean", projection="full", encoding="float64", curvature="exact:1"
    ) as rec:
        for ids in ORDER:
            with rec.step(ids) as s:
                out = model(x[ids])
                s.outputs(out, "squared-error")
                losses(ids, out).backward()
                optimizer.step()
            optimizer.zero_grad()
    return model


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Linear in the parameters, so that only the displacement is tested."""
    out: Tensor = model(batch)
    return out.sum(1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.8},
        {"momentum": 0.5, "nesterov": True},
        {"weight_decay": 0.2, "momentum": 0.6, "dampening": 0.3},
    ],
)
def test_corrected_removal_is_retraining_on_a_quadratic(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = train(settings, path=tmp_path / "run")
    question = torch.eye(3, dtype=D)
    samples = [0, 1, 5]
    actual = backstory.open(tmp_path / "run").predict_removal(samples, model, loss, question, contraction="never")
    base = loss(model, question).detach()
    truth = torch.stack([loss(train(settings, without=z), question).detach() - base for z in samples], 1)
    torch.testing.assert_close(actual.corrected, truth, rtol=1e-9, atol=1e-12)
    assert (actual.plain - truth).norm() > 1e-3 * truth.norm(), "the plain sum should miss the sample's own curvature"
    assert actual.samples == (0, 1, 5)


@pytest.mark.parametrize("contraction", ["never", "always"])
def test_one_occurrence_needs_no_correction(tmp_path: Path, contraction: Contraction) -> None:
    model = train({"momentum": 0.7}, path=tmp_path / "run")
    actual = backstory.open(tmp_path / "run").predict_removal(
        [5, 0], model, loss, torch.eye(3, dtype=D), contraction=contraction
    )
    torch.testing.assert_close(actual.plain[:, 0], actual.corrected[:, 0], rtol=1e-10, atol=1e-14)
    assert (actual.plain - actual.corrected)[:, 1].norm() > 0


def test_unknown_and_repeated_samples_are_refused(tmp_path: Path) -> None:
    model = train({}, path=tmp_path / "run")
    run = backstory.open(tmp_path / "run")
    with pytest.raises(UsageError, match="were never used"):
        run.predict_removal([77], model, loss, torch.eye(3, dtype=D))
    with pytest.raises(UsageError, match="listed twice"):
        run.predict_removal([1, 1], model, loss, torch.eye(3, dtype=D))
