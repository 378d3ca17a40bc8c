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
from tests.support.loops import generator, terms_of
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import CoverageError
from backstory.run.run import Run
from backstory.store import RunStore

NAMES = ["GPT-2", "GPT-NeoX", "Llama", "nanoGPT"]
ROUNDING = 0.1  # of bfloat16, 2⁻⁸, through two layers


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_rows_under_autocast_are_those_of_float32_but_for_rounding(name: str, tmp_path: Path) -> None:
    model = make(name, torch.float32)
    actual, expected = train(tmp_path / "run", model, adamw(model), around=bfloat16, steps=3)
    assert_close(actual.rows, expected, ROUNDING)
    assert not torch.allclose(actual.rows, expected, rtol=1e-5, atol=0), "nothing was rounded: autocast was off"


@pytest.mark.parametrize(("name", "projection"), [("GPT-2", "learned"), ("Llama", "random"), ("nanoGPT", "mask")])
def test_subspaces_under_autocast(name: str, projection: str, tmp_path: Path) -> None:
    model = make(name, torch.float32)
    actual, _ = train(tmp_path / "run", model, adamw(model), around=bfloat16, projection=projection, rank=4)
    assert bool(actual.rows.isfinite().all())


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_bfloat16(name: str, tmp_path: Path) -> None:
    model, wide = make(name, torch.bfloat16), make(name, torch.bfloat16).float()
    actual, expected = train(tmp_path / "run", model, adamw(model), truth=wide, steps=1)
    assert_close(actual.rows, expected, ROUNDING)


@pytest.mark.parametrize(
    ("projection", "curvature"), [("full", "empirical"), ("learned", "sampled:1"), ("random", "exact:3")]
)
def test_a_step_that_lies_in_autocast_as_a_whole_is_not_rounded_further(
    projection: str, curvature: str, tmp_path: Path
) -> None:
    """Float32 layers after the autocast ones are those of a loop with its forward pass alone in autocast."""

    def rows(path: Path, whole: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.LayerNorm(15), nn.Linear(15, 3))
        optimizer = adamw(model)
        settings: dict[str, Any] = {
            "projection": projection,
            "rank": 3,
            "curvature": curvature,
            "encoding": "float32",
            "warmup_steps": 2,
        }
        with backstory.record(model, optimizer, path, loss_reduction="mean", **settings) as rec:
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


class Island(nn.Module):
    """A layer that stays in float32 within autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.island = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.inside(x)).float()
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.island(seen)
        return out


def island(
    path: Path, around: Callable[[], AbstractContextManager[Any]], *, inside: bool = True, **settings: Any
) -> tuple[Run, nn.Module]:
    """Two steps, each as a whole inside `around`, with their forward passes in bfloat16."""
    torch.manual_seed(0)
    model = Island()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        around(),
        backstory.record(model, optimizer, path, loss_reduction="mean", encoding="float32", **settings) as rec,
    ):
        for t in range(2):
            x = torch.randn(6, 4, generator=generator(t))
            with rec.step(range(6 * t, 6 * t + 6)) as s:
                with bfloat16():
                    out = model(x)
                    if "curvature" in settings and inside:
                        s.outputs(out, "cross-entropy")
                if "curvature" in settings and not inside:
                    s.outputs(out, "cross-entropy")
                F.cross_entropy(out, torch.arange(6) % 3).backward()
                optimizer.step()
            optimizer.zero_grad()
    return backstory.open(path), model


@pytest.mark.parametrize("curvature", ["exact:3", "sampled:2"])
def test_outputs_given_inside_autocast_are_those_given_after_it(curvature: str, tmp_path: Path) -> None:
    """The extra backward passes lie outside of autocast, as the user's own does."""
    settings: dict[str, Any] = {"projection": "full", "curvature": curvature}
    runs = [island(tmp_path / str(k), contextlib.nullcontext, inside=k > 0, **settings)[0] for k in range(2)]
    after, inside = (run._store.read(0, 12, curvature=True).curvature for run in runs)
    assert after is not None
    assert inside is not None
    assert_same(inside, after, terms_of(Island(), 2, 6))


def test_a_float32_layer_in_a_step_inside_autocast_is_not_refused(tmp_path: Path) -> None:
    """torch rounds its weight's gradient there: the sums are held to the rounding."""
    run, _ = island(tmp_path / "run", bfloat16, projection="full")
    assert run.n_steps == 2


def test_a_basis_learned_at_the_end_inside_autocast_is_not_rounded(tmp_path: Path) -> None:
    run, _ = island(tmp_path / "run", bfloat16, projection="learned", rank=2)
    for name, side in run._store.load_tensors("basis").items():
        if side.dim() == 2 and side.is_floating_point():
            assert side.dtype != torch.bfloat16, name
            assert_close(side.T @ side, torch.eye(side.shape[1]).to(side), 1e-5)


def test_a_question_inside_autocast_is_rounded_in_its_forward_pass_alone(tmp_path: Path) -> None:
    run, model = island(tmp_path / "run", contextlib.nullcontext, projection="learned", rank=2)
    x, y = torch.randn(5, 4, generator=generator(7)), torch.arange(5) % 3

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        with bfloat16():
            return F.cross_entropy(net(batch), y, reduction="none")

    def ask() -> list[Tensor]:
        adjoint = run.query(model, loss, x, method="adjoint").scores
        run.embed()
        both = run.query(model, loss, x, method="embeddings").scores
        return [adjoint, both, run.predict_removal([0, 3], model, loss, x).corrected]

    expected = ask()
    with bfloat16():
        actual = ask()
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, 1e-6)


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
    settings: dict[str, Any] = {"projection": "full", "encoding": "float64", "scaler": scaler}
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
    actual = kept(tmp_path / "run")
    assert_close(
        actual.rows, expected, ROUNDING if half else 1e-4, "1024 or its inverse: the loss scale was not taken out."
    )
    assert actual.clip == pytest.approx(clips, rel=1e-4)
    assert (max_norm < 1) == (max(actual.clip) < 1)
