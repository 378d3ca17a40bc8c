"""Rows that do not add up to the gradient are refused, with the parameter's name."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.oracles import assert_close
from tests.session.loops import (
    FULL,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    one_backward_each,
    one_step,
    seeded,
    sgd,
    stored,
    train,
)
from torch import Tensor, nn

import backstory
from backstory.errors import CoverageError
from backstory.maths.layers import RULES

SUBSPACES: list[dict[str, Any]] = [
    FULL,
    {"subspace": "learned", "rank": 2},
    {"subspace": "random", "rank": 2},
    {"subspace": "mask", "rank": 2},
]


class Functional(nn.Module):
    """Uses a layer's weight once more, outside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        out: Tensor = self.out(h + 0.1 * F.linear(h, self.first.weight))
        return out


@pytest.mark.parametrize("settings", SUBSPACES)
def test_a_weight_used_outside_its_module_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    model = seeded(Functional())
    with pytest.raises(
        CoverageError, match=r"'first.weight' do not add up .* in step 0 .*used outside.*layers=\['!name'\]"
    ):
        train(tmp_path / "run", model, sgd(model), 1, **settings)
    assert backstory.open(tmp_path / "run").n_steps == 0


@pytest.mark.parametrize("settings", SUBSPACES)
def test_a_stale_gradient_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec:
        one_step(rec, model, optimizer, ids_of(0))
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        with pytest.raises(CoverageError, match=r"'\d.\w+' do not add up .* in step 1 .*were not zeroed"):
            one_step(rec, model, optimizer, ids_of(1))


def test_a_forward_before_the_step_is_found(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        loss = cross_entropy(model, batch_of([0, 1])).mean()
        with rec.step([0, 1]):
            loss.backward()
            with pytest.raises(CoverageError, match=r"off by 100.0%"):
                optimizer.step()
            rec._reader.scaler = object()  # as if a scaler had skipped it, so that the step may end


class Attention(nn.Module):
    """Whose output layer is called functionally inside torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.attention(x, x, x, need_weights=False)
        out: Tensor = self.out(h).mean(1)
        return out


def test_attention_is_found_and_left_out_as_a_whole_is_right(tmp_path: Path) -> None:
    def batch(ids: Any) -> tuple[Tensor, ...]:
        x, y = batch_of(ids)
        return torch.cat([x, x[:, :1]], 1)[:, None].expand(-1, 3, -1) * torch.arange(1, 4)[:, None], y

    model = seeded(Attention())
    with pytest.raises(CoverageError, match=r"in_proj_weight +\d+.\d%"):
        train(tmp_path / "none", model, sgd(model), 1, batch=batch)
    expected = one_backward_each(model, batch(ids_of(0)), cross_entropy, ["out.weight", "out.bias"])
    everything = one_backward_each(model, batch(ids_of(0)), cross_entropy, [n for n, _ in model.named_parameters()])
    train(tmp_path / "run", model, sgd(model), 1, batch=batch, layers=["!attention*"])
    found = stored(tmp_path / "run")
    assert_close(found.rows, expected, 1e-10)
    share = float(expected.mean(0).square().sum() / everything.mean(0).square().sum())
    assert found.table.coverage.tolist() == pytest.approx([share], rel=1e-10)
    (note,) = [n for n in backstory.open(tmp_path / "run").notes() if "not recorded" in n]
    assert note == f"4 parameters are not recorded; the rest covers {share:.1%} of the squared gradient norm"


class Gain(nn.Module):
    """A layer that needs a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.fixture
def _registry() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("settings", [FULL, {"subspace": "learned", "rank": 2}])
def test_a_registered_rule_is_used_and_a_wrong_one_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    def right(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
        return {"gain": inputs[0] * delta}

    def wrong(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
        return {"gain": 1.01 * inputs[0] * delta}

    model = seeded(nn.Sequential(Gain(), nn.Linear(3, 2)))
    backstory.register(Gain, wrong)
    with pytest.raises(CoverageError, match=r"'0.gain' .*\(off by 1.0%\).*a custom rule is wrong"):
        train(tmp_path / "wrong", model, sgd(model), 1, **settings)
    backstory.register(Gain, right)
    expected = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, [n for n, _ in model.named_parameters()])
    train(tmp_path / "right", model, sgd(model), 1, **settings)
    if settings is FULL:
        assert_close(stored(tmp_path / "right").rows, expected, 1e-10)


def test_gradients_that_cancel_are_no_false_alarm(tmp_path: Path) -> None:
    """Σ w g of nearly 0 beside large rows: rounding is measured against the rows, not against their sum."""
    model = mlp().float()
    optimizer = sgd(model)
    x, y = batch_of([0, 0, 1, 1])
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="weights", **FULL) as rec:
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0 + 1e-6])  # of the samples' own losses
        with rec.step(["a", "b", "c", "d"], weights=torch.ones(4)):
            (signs * cross_entropy(model, (x.float(), y))).sum().backward()
            optimizer.step()
    assert backstory.open(tmp_path / "run").n_steps == 1


def test_clipped_and_scaled_steps_add_up(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2, max_norm=0.01)
    assert stored(tmp_path / "run").table.clip.max() < 0.2
