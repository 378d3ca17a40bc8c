"""Autocast, half precision and the loss scale: rows within the rounding of the type that computed them."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.language import adamw, kept, logits_of, make, one_backward_each, text, token_losses, train
from tests.oracles import assert_close
from tests.session.loops import generator
from torch import Tensor, nn

import backstory
from backstory.errors import CoverageError
from backstory.store import RunStore

NAMES = ["GPT-2", "GPT-NeoX", "Llama", "nanoGPT"]
ROUNDING = 0.1  # of bfloat16, 2⁻⁸, through two layers


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_rows_under_autocast_are_those_of_float32_but_for_rounding(name: str, tmp_path: Path) -> None:
    model = make(name, torch.float32)
    found, expected = train(tmp_path / "run", model, adamw(model), around=bfloat16, steps=3)
    assert_close(found.rows, expected, ROUNDING)
    assert not torch.allclose(found.rows, expected, rtol=1e-5, atol=0), "nothing was rounded: autocast was off"


@pytest.mark.parametrize(("name", "subspace"), [("GPT-2", "learned"), ("Llama", "random"), ("nanoGPT", "mask")])
def test_subspaces_under_autocast(name: str, subspace: str, tmp_path: Path) -> None:
    model = make(name, torch.float32)
    found, _ = train(tmp_path / "run", model, adamw(model), around=bfloat16, subspace=subspace, rank=4)
    assert bool(found.rows.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_bfloat16(name: str, tmp_path: Path) -> None:
    model, wide = make(name, torch.bfloat16), make(name, torch.bfloat16).float()
    found, expected = train(tmp_path / "run", model, adamw(model), truth=wide, steps=1)
    assert_close(found.rows, expected, ROUNDING)


@pytest.mark.parametrize(
    ("subspace", "curvature"), [("full", "empirical"), ("learned", "sampled:1"), ("random", "exact:3")]
)
def test_a_step_that_lies_in_autocast_as_a_whole_is_not_rounded_further(
    subspace: str, curvature: str, tmp_path: Path
) -> None:
    """Float32 layers after the autocast ones are those of a loop with its forward pass alone in autocast."""

    def rows(path: Path, whole: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.LayerNorm(15), nn.Linear(15, 3))
        optimizer = adamw(model)
        settings = {"subspace": subspace, "rank": 3, "curvature": curvature, "encoding": "float32", "warmup_steps": 2}
        with backstory.record(model, optimizer, path, loss_reduction="mean", **settings) as rec:  # type: ignore[arg-type]
            for t in range(4):
                x = torch.randint(0, 7, (6, 3), generator=generator(t))
                with contextlib.ExitStack() as stack, rec.step(range(6 * t, 6 * t + 6)) as s:
                    if whole:
                        stack.enter_context(bfloat16())
                    with bfloat16():
                        out = model(x)
                        if curvature != "empirical":
                            s.outputs(out.float(), "cross-entropy")
                    F.cross_entropy(out.float(), x[:, 0] % 3).backward()
                    optimizer.step()
                optimizer.zero_grad()
        block = RunStore.open(path).read(0, 24, curvature=True)
        assert block.rows is not None
        return block.rows if block.curvature is None else torch.cat([block.rows, block.curvature.flatten(0, -2)])

    assert_close(rows(tmp_path / "whole", True), rows(tmp_path / "forward", False), 1e-4)


class Leaky(nn.Module):
    """A sixth of the weight's gradient comes from a use outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + 0.2 * F.linear(x, self.layer.weight)
        return out


def test_the_safety_net_still_holds_under_autocast(tmp_path: Path) -> None:
    model, x = Leaky(), torch.randn(5, 4, generator=generator(0))
    optimizer = adamw(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean") as rec:
        with pytest.raises(CoverageError, match=r"'layer.weight' do not add up"), rec.step(range(5)):
            with bfloat16():
                loss = model(x).float().square().mean(1).mean()
            loss.backward()
            optimizer.step()


def scaled_loop(
    path: Path, model: nn.Module, max_norm: float, around: Callable[[], AbstractContextManager[Any]]
) -> tuple[Tensor, list[float]]:
    """Two steps with torch's own GradScaler and clipping after `unscale_`: true rows, and true clipping factors."""
    optimizer, batch, rows, clips = adamw(model), text(), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    settings: dict[str, Any] = {"subspace": "full", "encoding": "float64", "scaler": scaler}
    with backstory.record(model, optimizer, path, loss_reduction="token-mean", **settings) as rec:
        for t in range(2):
            rows.append(one_backward_each(model, batch))
            optimizer.zero_grad()
            with rec.step([f"{t}-{i}" for i in range(5)], tokens=batch.tokens):
                with around():
                    loss = token_losses(logits_of(model, batch), batch).sum() / batch.tokens.sum()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
                clips.append(min(1.0, max_norm / norm))
                scaler.step(optimizer)
                scaler.update()
    return torch.cat(rows).double(), clips


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_loss_scale_and_clipping(name: str, half: bool, max_norm: float, tmp_path: Path) -> None:
    model = make(name, torch.float32)
    around = bfloat16 if half else lambda: torch.autocast("cpu", enabled=False)
    expected, clips = scaled_loop(tmp_path / "run", model, max_norm, around)
    found = kept(tmp_path / "run")
    assert_close(
        found.rows, expected, ROUNDING if half else 1e-4, "1024 or its inverse: the loss scale was not taken out."
    )
    assert found.clip == pytest.approx(clips, rel=1e-4)
    assert (max_norm < 1) == (max(found.clip) < 1)
