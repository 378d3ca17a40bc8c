"""Query gradients: the fast way is used where it is right, and the answer is the same as one backward per query."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import (
    batch_of,
    cross_entropy,
    curved,
    mlp,
    normal,
    one_backward_each,
    seeded,
    sgd,
    terms_of,
    train,
    trained_names,
)
from tests.support.oracles import assert_close, assert_same
from tests.support.zoo import ZOO, Text
from torch import Tensor, nn

import backstory
from backstory.capture.modules import Blocks, find_blocks
from backstory.errors import NumericalError, UsageError
from backstory.maths.adam import Scale
from backstory.maths.projection import Basis, random_basis
from backstory.run import gradients as query_module
from backstory.run.gradients import LossFn, evaluate_loss, query_rows


class Asked:
    """A model, its blocks and its bases, and whether the slow way was taken."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch, rank: int | None = None) -> None:
        self.model = model
        self.blocks: Blocks = find_blocks(model, sgd(model), rank=rank)
        self.bases = [random_basis(b.shape, seed=0, name=b.name) for b in self.blocks.blocks]
        self.slow = False
        self._one_by_one = query_module._one_by_one
        monkeypatch.setattr(query_module, "_one_by_one", self._seen)

    def _seen(self, *args: Any) -> Tensor:
        self.slow = True
        return self._one_by_one(*args)

    def rows(self, loss_fn: LossFn, batch: Any, **settings: Any) -> Tensor:
        return query_rows(self.model, loss_fn, batch, self.blocks, self.bases, **settings)


@pytest.mark.parametrize(
    "name", ["linear", "conv2d, all unequal", "embedding", "tied weights", "a module called several times"]
)
def test_one_row_for_each_query(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = ZOO[name].make(), ZOO[name].batch(0, 4)
    asked = Asked(model, monkeypatch)
    expected = one_backward_each(model, batch, curved, trained_names(model))
    assert_close(asked.rows(lambda m, b: curved(m, b), batch), expected, 1e-10)
    assert not asked.slow


def test_the_fast_way_equals_the_slow_way_in_a_subspace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(mlp(), monkeypatch, rank=2)
    fast = asked.rows(cross_entropy, batch_of(range(5)))
    assert not asked.slow
    monkeypatch.setattr(query_module, "_together", lambda *args: None)
    slow = asked.rows(cross_entropy, batch_of(range(5)))
    assert asked.slow
    assert_close(fast, slow, 1e-10)


@pytest.mark.parametrize("name", ["tied weights", "embedding", "layer norm"])
def test_queries_in_adams_coordinates_are_scaled_before_they_are_projected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two ways agree, and both are P^½ times the true gradient, entry by entry."""
    model, batch = ZOO[name].make(), ZOO[name].batch(0, 4)
    asked = Asked(model, monkeypatch)
    asked.bases = [Basis(None, None) for _ in asked.bases]
    scales = []
    for i, b in enumerate(asked.blocks.blocks):
        left, right = (normal(max(1, d), seed=3 * i + k).abs() for k, d in enumerate(b.shape[:2]))
        scales.append(Scale(left, right if b.shape.d_in else None))
    half = torch.cat([s.left if s.right is None else torch.outer(s.left, s.right).flatten() for s in scales])
    expected = one_backward_each(model, batch, curved, trained_names(model)) * half
    assert_close(asked.rows(lambda m, b: curved(m, b), batch, scales=scales), expected, 1e-10)
    monkeypatch.setattr(query_module, "_together", lambda *args: None)
    assert_close(asked.rows(lambda m, b: curved(m, b), batch, scales=scales), expected, 1e-10)


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """As many losses as samples, but each of two samples."""
    losses = cross_entropy(model, batch)
    return losses + 0.5 * losses.roll(1)


def turned(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch).flip(0)


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none")


@pytest.mark.parametrize("loss_fn", [mixed, turned, contrastive])
def test_losses_that_mix_samples_take_the_slow_way_and_are_right(
    loss_fn: LossFn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = mlp(), batch_of(range(4))
    asked = Asked(model, monkeypatch)
    actual = asked.rows(loss_fn, batch)
    assert asked.slow
    expected = []
    for q in range(4):
        model.zero_grad()
        loss_fn(model, batch)[q].backward()
        expected.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert_close(actual, torch.stack(expected), 1e-10)


def test_a_scalar_is_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = mlp(), batch_of(range(4))
    asked = Asked(model, monkeypatch)
    actual = asked.rows(lambda m, b: cross_entropy(m, b).mean(), batch)
    expected = one_backward_each(model, batch, cross_entropy, trained_names(model)).mean(0)
    assert_close(actual, expected[None], 1e-10)


def test_as_many_queries_as_positions_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Text("(S,)"))
    (tokens,) = ZOO["positions (S,)"].batch(0, 5)
    asked = Asked(model, monkeypatch)
    expected = one_backward_each(model, (tokens,), curved, trained_names(model))
    assert_close(asked.rows(lambda m, b: curved(m, b), (tokens,)), expected, 1e-10)


class Placed(nn.Module):
    """Positions looked up once for the whole batch, as (1, S)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Mean over positions."""
        hidden = torch.tanh(self.tokens(x) + self.places(torch.arange(x.shape[1])[None]))
        out: Tensor = self.out(hidden).mean(1)
        return out


def test_positions_that_all_queries_share_take_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(seeded(Placed()), monkeypatch)
    tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(1))
    actual = asked.rows(curved, (tokens,))
    assert not asked.slow
    assert_close(actual, one_backward_each(asked.model, (tokens,), curved, trained_names(asked.model)), 1e-12)


def test_an_index_of_samples_is_not_taken_for_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Users(nn.Module):
        """One index and one number for each sample."""

        def __init__(self) -> None:
            super().__init__()
            self.user, self.out = nn.Embedding(6, 2), nn.Linear(4, 2)

        def forward(self, index: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.out(torch.cat([self.user(index), x], 1))
            return out

    model = seeded(Users())
    batch = (torch.arange(4), batch_of(range(4))[0][:, :2])
    asked = Asked(model, monkeypatch)
    expected = one_backward_each(model, batch, curved, trained_names(model))
    assert_close(asked.rows(lambda m, b: curved(m, b), batch), expected, 1e-10)
    assert not asked.slow


def test_every_flag_is_put_back_and_no_gradient_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    asked = Asked(model, monkeypatch)
    model.train()
    model[0].eval()
    model[2].weight.requires_grad_(False)
    first = asked.rows(cross_entropy, batch_of([0, 1]))
    assert_same(
        asked.rows(cross_entropy, batch_of([0, 1])), first, terms_of(model, 1, 2)
    )  # dropout is off in eval mode
    with torch.no_grad():
        assert_same(asked.rows(cross_entropy, batch_of([0, 1])), first, terms_of(model, 1, 2))
    assert [m.training for m in model.modules()] == [True, False, True, True]
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def fails(m: nn.Module, b: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        asked.rows(fails, None)
    assert [m.training for m in model.modules()] == [True, False, True, True]
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    asked = Asked(model, monkeypatch)
    seen: list[list[bool]] = []

    def watching(m: nn.Module, b: Any) -> Tensor:
        seen.append([x.training for x in m.modules()])
        return cross_entropy(m, b)

    for mode, flags in (("eval", [False] * 4), ("train", [True] * 4), ("as-is", [True, True, False, True])):
        model.train()
        model[1].eval()
        asked.rows(watching, batch_of([0, 1]), mode=mode)
        assert seen[-1] == flags
    with pytest.raises(UsageError, match="mode must be 'eval', 'train' or 'as-is', got 'test'"):
        asked.rows(cross_entropy, batch_of([0, 1]), mode="test")


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: torch.zeros(2), "does not depend on the model's parameters. Is something detached"),
        (lambda m, b: cross_entropy(m, b).detach(), "does not depend on the model's parameters"),
        (lambda m, b: b[0].clone().requires_grad_().sum(1), "query 0 depends on none of the recorded parameters"),
        (lambda m, b: m(b[0]), r"must return a scalar or one loss per query \(Q,\), got \(2, 2\)"),
        (lambda m, b: m(b[0])[:0, 0], r"must return a scalar .* got \(0,\)"),
        (lambda m, b: 3.0, "must return a scalar .* got float"),
    ],
)
def test_losses_that_cannot_be_asked(loss_fn: LossFn, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(mlp(), monkeypatch)
    with pytest.raises(UsageError, match=message):
        asked.rows(loss_fn, batch_of([0, 1]))


def test_a_loss_takes_the_model_or_the_model_and_a_batch() -> None:
    model, batch = mlp(), batch_of([0, 1])
    expected = cross_entropy(model, batch)

    def either(m: nn.Module, b: Any = batch) -> Tensor:
        return cross_entropy(m, b)

    assert_same(evaluate_loss(cross_entropy, model, batch), expected, terms_of(model, 1, 2))
    assert_same(evaluate_loss(lambda m: cross_entropy(m, batch), model), expected, terms_of(model, 1, 2))
    assert_same(evaluate_loss(lambda m, _: cross_entropy(m, batch), model), expected, terms_of(model, 1, 2))
    assert_same(evaluate_loss(either, model), expected, terms_of(model, 1, 2))
    assert_same(evaluate_loss(either, model, batch_of([3])), cross_entropy(model, batch_of([3])), terms_of(model, 1, 2))
    with pytest.raises(UsageError, match=r"the loss takes none: its signature is \(m\)"):
        evaluate_loss(lambda m: cross_entropy(m, batch), model, batch)
    with pytest.raises(
        UsageError, match=r"must take \(model\) or \(model, batch\), but its signature is \(m, b, more\)"
    ):
        evaluate_loss(lambda m, b, more: cross_entropy(m, b), model, batch)


@pytest.mark.parametrize("scalar", [False, True])
def test_a_query_with_nan_is_named(scalar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(mlp(), monkeypatch)
    bad = torch.tensor([1.0, float("nan")]).double()
    with pytest.raises(NumericalError, match=f"query {0 if scalar else 1} has NaN or Inf. Check its input"):
        asked.rows(
            lambda m, b: (cross_entropy(m, b) * bad).sum() if scalar else cross_entropy(m, b) * bad, batch_of([0, 1])
        )


def test_a_query_that_leaves_a_layer_alone_has_zeros_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    asked = Asked(model, monkeypatch)
    actual = asked.rows(lambda m, b: m.get_submodule("0")(b[0]).square().sum(1), batch_of([0, 1]))
    assert actual[:, 16:].abs().max() == 0 < actual[:, :16].abs().min()


def test_a_live_recording_is_not_disturbed(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2)
    run = backstory.open(tmp_path / "run")
    plain = run.query(model, cross_entropy, batch_of([0, 1])).scores
    with backstory.record(model, sgd(model), tmp_path / "other", loss_reduction="mean", projection="full"):
        assert_same(run.query(model, cross_entropy, batch_of([0, 1])).scores, plain, 2 * terms_of(model, 2))


def test_bases_are_those_given() -> None:
    model = mlp()
    blocks = find_blocks(model, sgd(model), rank=None)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    bases = [Basis(turn, None), *[Basis(None, None)] * 3]
    actual = query_rows(model, cross_entropy, batch_of([0]), blocks, bases)
    full = query_rows(model, cross_entropy, batch_of([0]), blocks, [Basis(None, None)] * 4)
    assert_close(actual[:, :12].reshape(1, 4, 3), turn.T @ full[:, :12].reshape(1, 4, 3), 1e-12)
