"""A wrong `loss_reduction` is refused where the losses show it, and nothing else is."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import FULL, batch_of, cross_entropy, mlp, sgd
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError

IDS = [0, 1, 2, 3]
LENGTHS = torch.tensor([2.0, 3.0, 4.0, 7.0], dtype=torch.float64)  # tokens, 16 in all
Loss = Callable[[Tensor], Tensor]


def step_of(path: Path, declared: str, loss: Loss, *, steps: int = 1, parts: int = 1, **batch: Any) -> backstory.Run:
    """Record steps of four samples in so many micro-batches; `loss` makes each one's loss from its samples' losses."""
    model = mlp()
    optimizer = sgd(model, 1e-3)
    with backstory.record(model, optimizer, path, loss_reduction=declared, **FULL) as rec:
        for _ in range(steps):
            optimizer.zero_grad()
            with rec.step() as s:
                for ids in torch.tensor(IDS).chunk(parts):
                    s.batch(ids, **{k: [v[i] for i in ids] for k, v in batch.items()})
                    losses = cross_entropy(model, batch_of(ids.tolist()))
                    s.losses(losses)
                    loss(losses).backward()
                optimizer.step()
    return backstory.open(path)


TOKENS: dict[str, Any] = {"tokens": [2, 3, 4, 7]}
EQUAL: dict[str, Any] = {"tokens": [4, 4, 4, 4]}
WRONG: dict[str, tuple[str, Loss, dict[str, Any], str]] = {
    "mean, is sum": ("mean", torch.sum, {}, r"losses 4 times .*loss_reduction='sum'"),
    "mean, is sum, as many tokens as samples": ("mean", torch.sum, EQUAL, r"loss_reduction='sum'"),
    "sum, is mean": ("sum", torch.mean, {}, r"losses 0\.25 times .*loss_reduction='mean'"),
    "mean, is token-mean": ("mean", lambda x: x.sum() / 16, TOKENS, r"loss_reduction='token-mean', or change"),
    "token-mean, is mean": ("token-mean", torch.mean, TOKENS, r"losses 4 times .*loss_reduction='mean'"),
    "token-mean, is sum": ("token-mean", torch.sum, TOKENS, r"loss_reduction='sum'"),
    "weights without 1/B": (
        "weights", lambda x: (x * LENGTHS).mean(), {"weights": LENGTHS.tolist()}, r"weights= that are 0\.25 times as large"
    ),
    "a mean of each micro-batch": ("mean", torch.mean, {"parts": 2}, r"2 times as much as declared\. Divide .* by 2.*='weights'"),
    "a sum over micro-batches": ("mean", torch.sum, {"parts": 2}, r"4 times as much as declared\..*loss_reduction='sum'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_reduction_that_the_losses_contradict_is_refused(case: str, tmp_path: Path) -> None:
    declared, loss, settings, message = WRONG[case]
    with pytest.raises(UsageError, match=f"loss_reduction='{declared}' does not match the loss: in step 0 .*{message}"):
        step_of(tmp_path / "run", declared, loss, **settings)
    assert backstory.open(tmp_path / "run").n_steps == 0


RIGHT: dict[str, tuple[str, Loss, dict[str, Any]]] = {
    "mean": ("mean", torch.mean, {}),
    "sum": ("sum", torch.sum, {}),
    "token-mean of sums": ("token-mean", lambda x: x.sum() / 16, TOKENS),
    "token-mean of means": ("token-mean", lambda x: (x * LENGTHS).sum() / 16, TOKENS),
    "mean of sums over tokens": ("mean", lambda x: (x / LENGTHS).mean(), TOKENS),
    "equal lengths": ("mean", lambda x: x.sum() / 16, EQUAL),
    "equal lengths, token-mean of means": ("token-mean", torch.mean, EQUAL),
    "weights": ("weights", lambda x: (x * LENGTHS).sum(), {"weights": LENGTHS.tolist()}),
    "weights, unequal to those of backward": ("weights", torch.sum, {"weights": LENGTHS.tolist()}),
    "accumulated mean": ("mean", lambda x: x.mean() / 2, {"parts": 2}),
    "accumulated sum": ("sum", torch.sum, {"parts": 2}),
    "accumulated token-mean": ("token-mean", lambda x: x.sum() / 16, {**TOKENS, "parts": 2}),
    "a factor that no reduction has": ("mean", lambda x: 0.3 * x.mean(), {}),
    "weights per class inside the loss": ("mean", lambda x: (x * LENGTHS).mean(), {}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_else_is_refused(case: str, tmp_path: Path) -> None:
    declared, loss, settings = RIGHT[case]
    assert step_of(tmp_path / "run", declared, loss, **settings).n_steps == 1


def test_a_later_step_is_not_stopped(tmp_path: Path) -> None:
    """A factor that happens to be the size of the last, smaller batch."""
    seen: list[int] = []

    def loss(losses: Tensor) -> Tensor:
        seen.append(len(losses))
        return losses.sum() if len(seen) == 3 else losses.mean()

    assert step_of(tmp_path / "run", "mean", loss, steps=3).n_steps == 3


def scaled(path: Path, declared: str) -> backstory.Run:
    """One step of four samples with a loss scale of 4, clipped."""
    model, scaler = mlp().float(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = sgd(model)
    with backstory.record(model, optimizer, path, loss_reduction=declared, scaler=scaler, **FULL) as rec:
        with rec.step(IDS) as s:
            x, y = batch_of(IDS)
            losses = nn.functional.cross_entropy(model(x.float()), y, reduction="none")
            s.losses(losses)
            scaler.scale(losses.mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
    return backstory.open(path)


def test_the_loss_scale_and_clipping_are_no_factor(tmp_path: Path) -> None:
    assert scaled(tmp_path / "run", "mean").n_steps == 1
    with pytest.raises(UsageError, match=r"loss_reduction='sum' does not match.*loss_reduction='mean'"):
        scaled(tmp_path / "wrong", "sum")


@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_losses_in_half_precision_are_close_enough(declared: str, tmp_path: Path) -> None:
    model = mlp().bfloat16()
    optimizer = sgd(model)
    ids = range(7)  # 1/7 is rounded
    refused = pytest.raises(UsageError, match="loss_reduction='mean'") if declared == "sum" else nullcontext()
    with refused, backstory.record(model, optimizer, tmp_path / "run", loss_reduction=declared, **FULL) as rec:
        with rec.step(ids) as s:
            x, y = batch_of(ids)
            losses = nn.functional.cross_entropy(model(x.bfloat16()), y, reduction="none")
            s.losses(losses)
            losses.mean().backward()
            optimizer.step()
    assert backstory.open(tmp_path / "run").n_steps == (declared == "mean")


def test_losses_that_two_passes_went_through_are_not_checked(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        with rec.step(IDS) as s:
            losses = cross_entropy(model, batch_of(IDS))
            s.losses(losses)
            losses.sum().backward(retain_graph=True)
            (-0.75 * losses.sum()).backward()  # both together are the mean
            optimizer.step()
    assert backstory.open(tmp_path / "run").n_steps == 1
