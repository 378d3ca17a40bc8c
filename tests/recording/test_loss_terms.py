"""Weights of loss terms measured from outputs, against losses whose weights are known; wrong reductions refused in ordinary loops."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import FULL, batch_of, mlp, normal, seeded, sgd
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.recording.loss_terms import terms_of

B, S, C = 4, 5, 3
LABELS = torch.randint(0, C, (B, S), generator=torch.Generator().manual_seed(0))
PADDED = LABELS.where(torch.arange(S) <= torch.arange(B)[:, None] + 1, -100)  # 2, 3, 4, 5 of them
TERMS = torch.tensor([2.0, 3, 4, 5]).double()
Loss = Callable[[Tensor], Tensor]


def tokens(f: Tensor, reduction: str, labels: Tensor = PADDED) -> Tensor:
    return F.cross_entropy(f.flatten(0, 1), labels.flatten(), reduction=reduction)


SEEN: dict[str, tuple[Loss, tuple[int, ...], Any, Any]] = {
    "classes, mean": (lambda f: F.cross_entropy(f, LABELS[:, 0]), (B, C), [1 / B] * B, [1.0] * B),
    "classes, sum": (lambda f: F.cross_entropy(f, LABELS[:, 0], reduction="sum"), (B, C), [1.0] * B, [1.0] * B),
    "token mean": (lambda f: tokens(f, "mean"), (B, S, C), [1 / 14] * B, TERMS.tolist()),
    "mean of means": (
        lambda f: (tokens(f, "none").view(B, S).sum(1) / TERMS).mean(), (B, S, C), (1 / (B * TERMS)).tolist(), TERMS.tolist()
    ),
    "bce": (lambda f: F.binary_cross_entropy_with_logits(f, LABELS.double() % 2), (B, S), [1 / (B * S)] * B, [S] * B),
    "bce of one output": (
        lambda f: F.binary_cross_entropy_with_logits(f, LABELS[:, 0].double() % 2), (B,), [1 / B] * B, [1.0] * B
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SEEN)
def test_weights_of_terms_are_measured(name: str, dtype: torch.dtype) -> None:
    loss, shape, weight, number = SEEN[name]
    f = normal(*shape, seed=3).to(dtype).requires_grad_()
    wide = f.double()
    (delta,) = torch.autograd.grad(loss(wide), f)
    found = terms_of(f.detach(), delta)
    assert found is not None
    assert found.weight.tolist() == pytest.approx(weight, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert found.number.tolist() == number


OTHER: dict[str, Loss] = {
    "squared error": lambda f: F.mse_loss(f, normal(B, C)),
    "class weights": lambda f: F.cross_entropy(f, torch.arange(B) % C, weight=torch.tensor([0.2, 1.0, 3.0]).double()),
    "smoothing": lambda f: F.cross_entropy(f, LABELS[:, 0], label_smoothing=0.2),
    "soft labels": lambda f: F.cross_entropy(f, normal(B, C).softmax(1)),
    "hinge": lambda f: F.multi_margin_loss(f, LABELS[:, 0]),
    "focal": lambda f: (
        (1 - f.softmax(1).gather(1, LABELS[:, :1])) ** 2 * F.cross_entropy(f, LABELS[:, 0], reduction="none")
    ).mean(),
    "nothing": lambda f: 0 * f.sum(),
}


@pytest.mark.parametrize("name", OTHER)
def test_of_other_losses_no_common_weight_is_measured(name: str) -> None:
    f = normal(B, C, seed=3).requires_grad_()
    (delta,) = torch.autograd.grad(OTHER[name](f), f)
    found = terms_of(f.detach(), delta)
    assert found is None or len(set(found.weight.round(decimals=6).tolist())) > 1


class Language(nn.Module):
    """Tokens to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x).tanh())
        return out


def language(path: Path, declared: str, loss: Loss, steps: int = 1, **batch: Any) -> None:
    model = Language()
    seeded(model)
    optimizer = sgd(model)
    settings = {**FULL, "curvature": "empirical"}
    with backstory.record(model, optimizer, path, loss_reduction=declared, **settings) as rec:
        for _ in range(steps):
            optimizer.zero_grad()
            with rec.step(range(B), **batch):
                loss(model(torch.arange(B * S).view(B, S) % 9)).backward()
                optimizer.step()


def test_a_padded_language_batch_with_a_mean_is_warned_of_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"have 2 to 5 of them.*loss_reduction='token-mean', and pass tokens=") as seen:
        language(tmp_path / "run", "mean", lambda f: tokens(f, "mean"), steps=3)
    assert len(seen) == 1


WRONG: dict[str, tuple[str, Loss, dict[str, Any], str]] = {
    "sum for mean": ("mean", lambda f: tokens(f, "sum"), {}, r"4 times as much.*loss_reduction='sum'"),
    "mean for sum": ("sum", lambda f: tokens(f, "mean", LABELS) * S, {}, r"0\.25 times as much.*loss_reduction='mean'"),
    "tokens of the shift": ("token-mean", lambda f: tokens(f, "mean"), {"tokens": [5, 5, 5, 5]}, r"declares 20 tokens .* the loss has 14 terms.*labels\[:, 1:\]"),
    "sum for token-mean": ("token-mean", lambda f: tokens(f, "sum"), {"tokens": [2, 3, 4, 5]}, r"14 times as much.*loss_reduction='sum'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reduction_is_refused_without_losses(name: str, tmp_path: Path) -> None:
    declared, loss, batch, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        language(tmp_path / "run", declared, loss, **batch)
    assert backstory.open(tmp_path / "run").n_steps == 0


RIGHT: dict[str, tuple[str, Loss, dict[str, Any]]] = {
    "token mean": ("token-mean", lambda f: tokens(f, "mean"), {"tokens": [2, 3, 4, 5]}),
    "mean of means": ("mean", lambda f: (tokens(f, "none").view(B, S).sum(1) / TERMS).mean(), {}),
    "mean of sums": ("mean", lambda f: tokens(f, "none").view(B, S).sum(1).mean(), {}),
    "equal lengths": ("mean", lambda f: tokens(f, "mean", LABELS), {}),
    "equal lengths, tokens told": ("mean", lambda f: tokens(f, "mean", LABELS), {"tokens": [5] * B}),
    "equal lengths, counted": ("token-mean", lambda f: tokens(f, "mean", LABELS), {"tokens": [5] * B}),
    "sum": ("sum", lambda f: tokens(f, "sum"), {}),
    "a factor of its own": ("mean", lambda f: 0.37 * tokens(f, "none").view(B, S).sum(1).mean(), {}),
    "weights": ("weights", lambda f: tokens(f, "mean"), {"weights": [1 / 14] * B}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_is_recorded_without_a_word(name: str, tmp_path: Path) -> None:
    declared, loss, batch = RIGHT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        language(tmp_path / "run", declared, loss, **batch)


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("curvature", ["auto", "empirical"])
def test_a_classifiers_sum_is_no_mean(curvature: str, scale: float, tmp_path: Path) -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = sgd(model)
    x, y = batch_of([0, 1, 2, 3])
    settings: dict[str, Any] = {"encoding": "float64", "curvature": curvature, "scaler": scaler}
    with pytest.raises(UsageError, match=r"4 times as much as declared.*loss_reduction='sum'"):
        with backstory.record(model, optimizer, tmp_path, loss_reduction="mean", **settings) as rec, rec.step(range(4)):
            scaler.scale(F.cross_entropy(model(x), y, reduction="sum")).backward()
            scaler.step(optimizer)
