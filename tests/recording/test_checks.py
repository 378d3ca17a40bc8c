"""Rows that do not add up to the gradient are refused, with the parameter's name."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import (
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
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import CoverageError, NumericalError, UnsupportedError
from backstory.maths.layers import RULES, Sum

PROJECTIONS: list[dict[str, Any]] = [
    FULL,
    {"projection": "learned", "rank": 2},
    {"projection": "random", "rank": 2},
    {"projection": "mask", "rank": 2},
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


@pytest.mark.parametrize("settings", PROJECTIONS)
def test_a_weight_used_outside_its_module_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    model = seeded(Functional())
    with pytest.raises(
        CoverageError, match=r"'first.weight' do not add up .* in step 0 .*used outside.*layers=\['!name'\]"
    ):
        train(tmp_path / "run", model, sgd(model), 1, **settings)
    assert backstory.open(tmp_path / "run").n_steps == 0


@pytest.mark.parametrize("settings", PROJECTIONS)
def test_a_stale_gradient_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec:
        one_step(rec, model, optimizer, ids_of(0))
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        with pytest.raises(
            CoverageError, match=r"'\d.\w+' do not add up .* in step 1 .*zero_grad\(\) before each step\. To accumulate"
        ):
            one_step(rec, model, optimizer, ids_of(1))


@pytest.mark.parametrize("clip", [1e9, 0.01])
def test_a_stale_gradient_of_one_number_is_named_in_a_later_step(clip: float, tmp_path: Path) -> None:
    """Only one block is checked there, in turn; zeroed inside the step, it would be no cause."""
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(7):
            with rec.step(ids_of(t)):
                optimizer.zero_grad()
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        with pytest.raises(
            CoverageError, match=r"earlier backward pass were still there: call optimizer.zero_grad\(\)"
        ):
            with rec.step(ids_of(7)):
                cross_entropy(model, batch_of(ids_of(7))).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()


def test_what_was_zeroed_inside_the_step_is_no_cause(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        one_step(rec, model, optimizer, ids_of(0))
        with pytest.raises(CoverageError, match="Likely causes"):
            with rec.step(ids_of(1)):
                optimizer.zero_grad()
                (cross_entropy(model, batch_of(ids_of(1))).mean() + model.get_parameter("0.weight").sum()).backward()
                optimizer.step()


def test_a_forward_before_the_step_is_found(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        loss = cross_entropy(model, batch_of([0, 1])).mean()
        with rec.step([0, 1]):
            loss.backward()
            with pytest.raises(CoverageError, match=r"off by 100.0%"):
                optimizer.step()
            rec.watcher.reader.scaler = object()  # as if a scaler had skipped it, so that the step may end


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
        train(tmp_path / "none", model, sgd(model), 1, batch=batch, uncovered="error")
    expected = one_backward_each(model, batch(ids_of(0)), cross_entropy, ["out.weight", "out.bias"])
    everything = one_backward_each(model, batch(ids_of(0)), cross_entropy, [n for n, _ in model.named_parameters()])
    train(tmp_path / "run", model, sgd(model), 1, batch=batch, layers=["!attention*"])
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, expected, 1e-10)
    share = float(expected.mean(0).square().sum() / everything.mean(0).square().sum())
    assert actual.table.coverage.tolist() == pytest.approx([share], rel=1e-10)
    (note,) = [n for n in backstory.open(tmp_path / "run").caveats() if "not recorded" in n]
    assert note == f"4 parameters are not recorded; the recorded ones cover {share:.1%} of the gradient (squared norm)"


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
@pytest.mark.parametrize("settings", [FULL, {"projection": "learned", "rank": 2}])
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


class Cancelling(nn.Module):
    """Two biases whose gradients are 0 for each sample: before a norm of single channels, and of attention's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 2), nn.GroupNorm(4, 4)
        self.q, self.k, self.v, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x[:, None])).mT
        out: Tensor = self.out((self.q(h) @ self.k(h).mT).softmax(-1) @ self.v(h)).mean(1)
        return out


def long(dtype: torch.dtype) -> Callable[[Any], tuple[Tensor, ...]]:
    """Batches of 12 numbers a sample, so that there are positions to sum over."""

    def batch(ids: Any) -> tuple[Tensor, ...]:
        x, y = batch_of(ids)
        return torch.cat([x * (k + 1) for k in range(4)], 1).sin().to(dtype), y

    return batch


DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("settings", PROJECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_exactly_zero_are_no_false_alarm(
    settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Cancelling()).to(dtype)
    train(tmp_path / "run", model, sgd(model), 3, batch=long(dtype), **settings)
    assert backstory.open(tmp_path / "run").n_steps == 3
    for name in ("conv.bias", "k.bias"):
        grad = model.get_parameter(name).grad
        assert grad is not None
        assert float(grad.norm()) < 1e-5, "not a gradient of 0: this test shows nothing"


WRONG: dict[str, Callable[[Tensor], Tensor]] = {  # of the terms of each sample and position
    "scaled": lambda delta: 1.01 * delta,
    "shifted": lambda delta: delta + 5e-3 * delta.abs().mean(1, keepdim=True),
    "shifted a little": lambda delta: delta + 1e-4 * delta.abs().mean(1, keepdim=True),
    "missing": lambda delta: torch.cat([torch.zeros_like(delta[:1]), delta[1:]]),
}


@pytest.mark.usefixtures("_registry")
@pytest.mark.parametrize("settings", PROJECTIONS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("how", "name"), [("scaled", "v"), ("shifted", "v"), ("missing", "v"), ("shifted a little", "k")]
)
def test_a_wrong_bias_row_is_refused(
    how: str, name: str, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also where the gradient is 0: the bound follows what was summed, not what is left."""
    model = seeded(Cancelling()).to(dtype)
    right = RULES[nn.Linear]

    def wrong(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Any]:
        out = dict(right(module, inputs, delta))
        if module is model.get_submodule(name):
            out["bias"] = Sum(WRONG[how](delta))
        return out

    backstory.register(nn.Linear, wrong)
    with pytest.raises(CoverageError, match=rf"'{name}.bias' do not add up .*a custom rule is wrong"):
        train(tmp_path / "run", model, sgd(model), 1, batch=long(dtype), **settings)


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def adversarial(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return F.cross_entropy(model(x.detach() + 0.1 * slope.sign()), y)


def adversarial_by_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_()
    F.cross_entropy(model(x), y).backward()
    model.zero_grad()
    assert x.grad is not None
    return F.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), y)


def shrinking(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + 0.03 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("settings", PROJECTIONS[:2])
@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (penalty, r"create_graph=True ran in this step, as for a gradient penalty"),
        (adversarial, r"torch.autograd.grad ran .* adversarial .*before rec.step\(\)"),
        (adversarial_by_backward, r"2 backward passes ran .* declares 1 micro-batches"),
        (shrinking, r"0.06 times the parameter itself, as from an L2 term .* add 0.06 to weight_decay= of SGD or Adam"),
    ],
)
def test_what_the_step_shows_of_the_cause_is_named(
    loss: Any, cause: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = mlp()
    optimizer = sgd(model)
    with (
        pytest.raises(CoverageError, match=cause),
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec,
        rec.step(ids_of(0)),
    ):
        loss(model, *batch_of(ids_of(0))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


class Alone(nn.Module):
    """Its one bias is used once more, outside: what is missing is a number, and so is the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x) + 3 * self.out.bias
        return out


def growing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) - 0.03 * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("which", ["a bias alone", "a term that lets weights grow"])
def test_what_is_no_l2_term_is_not_called_one(which: str, tmp_path: Path) -> None:
    model = seeded(Alone()) if which == "a bias alone" else mlp()
    if isinstance(model, Alone):
        model.out.bias.data.fill_(5.0)  # so large that what is missing has its sign, as of an L2 term
    optimizer = sgd(model)
    x, y = batch_of(ids_of(0))
    x = x[:, :3] if which == "a bias alone" else x
    with (
        pytest.raises(CoverageError, match="Likely causes"),
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec,
        rec.step(ids_of(0)),
    ):
        (model(x).square().mean() if which == "a bias alone" else growing(model, x, y)).backward()
        optimizer.step()


@pytest.mark.parametrize("settings", PROJECTIONS[:2])
def test_nan_that_somebody_writes_into_a_gradient_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with (
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec,
        pytest.raises(NumericalError, match=r"NaN or Inf was written to .grad after backward"),
        rec.step(ids_of(0)),
    ):
        cross_entropy(model, batch_of(ids_of(0))).mean().backward()
        next(model.parameters()).grad[0] = torch.nan  # type: ignore[index]
        optimizer.step()
    assert backstory.open(tmp_path / "run").n_steps == 0


class InParts(nn.Module):
    """Attention over positions whose keys are computed in several calls."""

    def __init__(self, calls: int, d: int = 32) -> None:
        super().__init__()
        self.calls, self.q, self.k, self.v = calls, nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        k = torch.cat([self.k(part) for part in x.chunk(self.calls, 1)], 1)
        return F.scaled_dot_product_attention(self.q(x), k, self.v(x))


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_key_biases_in_half_precision(
    how: str, calls: int, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call's gradient is rounded before they are added up to 0; rows of half the positions are still refused."""
    model = seeded(InParts(calls))
    if how == "bfloat16":
        model.bfloat16()
    right = RULES[nn.Linear]

    def half(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Any]:
        actual = right(layer, inputs, delta)
        delta = delta.clone()
        delta[:, ::2] = 0.0
        return {**actual, "bias": Sum(delta)} if layer is model.k else actual

    monkeypatch.setitem(RULES, nn.Linear, half if wrong else right)
    g = torch.Generator().manual_seed(0)
    x, target = torch.randn(8, 64, 32, generator=g), torch.randn(8, 64, 32, generator=g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(CoverageError, match=r"'k\.bias' do not add up") if wrong else contextlib.nullcontext(),
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec,
        rec.step(list(range(8))),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            out = model(x.to(next(model.parameters()).dtype))
        ((out.float() * target).sum() / 8).backward()
        optimizer.step()


def test_adversarial_examples_made_before_the_step_are_recorded(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    x, y = batch_of(ids_of(0))
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x.requires_grad_()), y), x)
        with rec.step(ids_of(0)):
            F.cross_entropy(model(x.detach() + 0.1 * slope.sign()), y).backward()
            optimizer.step()
    assert backstory.open(tmp_path / "run").n_steps == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_weight_decay_takes_the_place_of_an_l2_term(kind: Any, tmp_path: Path) -> None:
    """On top of what the optimizer has already."""
    model, other = mlp(), mlp()
    optimizer, plain = (
        kind(model.parameters(), lr=0.1, weight_decay=0.02 + 0.06),
        kind(other.parameters(), lr=0.1, weight_decay=0.02),
    )
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            one_step(rec, model, optimizer, ids_of(t))
            plain.zero_grad()
            shrinking(other, *batch_of(ids_of(t))).backward()
            plain.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q, 1e-9)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_is_refused_by_its_name(by_name: bool, tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)

    def closure() -> float:
        loss = cross_entropy(model, batch_of(ids_of(0))).mean()
        loss.backward()
        return float(loss)

    with (
        pytest.raises(UnsupportedError, match=r"step\(closure\) .*backward\(\) first"),
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec,
        rec.step(ids_of(0)),
    ):
        optimizer.step(**{"closure": closure}) if by_name else optimizer.step(closure)
