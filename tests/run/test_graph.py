"""The way of a query's backward passes: they reach every call, and go on to parameters only where torch's own layers do not tell all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.loops import batch_of, cross_entropy, curved, mlp, seeded, sgd
from tests.support.oracles import assert_close
from tests.support.zoo import ZOO
from torch import Tensor, nn

from backstory.capture.hooks import Tap
from backstory.capture.modules import find_blocks
from backstory.maths.layers import Dense, Outer, Sum
from backstory.maths.projection import Basis
from backstory.run import gradients as query_module
from backstory.run.gradients import query_rows
from backstory.run.graph import alike, corner, plain_blocks, walk


def seen(model: nn.Module, losses: Callable[[], Tensor], count: int) -> tuple[Tap, Any, Tensor]:
    tap = Tap(model, find_blocks(model, sgd(model), rank=None), lambda *_: None, keep_calls=True)
    tap.attach()
    tap.batch(count)
    out = losses()
    return tap, walk(out, tap.edges), out


@pytest.mark.parametrize("name", ["linear", "embedding", "tied weights", "a module called several times", "layer norm"])
def test_a_pass_to_the_deepest_calls_passes_every_call(name: str) -> None:
    model, batch = ZOO[name].make(), ZOO[name].batch(0, 4)
    tap, graph, out = seen(model, lambda: curved(model, batch), 4)
    calls: list[int] = []
    tap.sink = lambda slot, block, part, group: calls.append(block)
    torch.autograd.grad(out.sum(), graph.deepest, retain_graph=True)
    short = sorted(calls)
    calls.clear()
    torch.autograd.grad(out.sum(), [b.parameter for b in tap.blocks.blocks], allow_unused=True)
    assert short == sorted(calls)
    assert short


def test_only_the_first_layer_is_deepest_in_a_chain() -> None:
    model, batch = mlp(), batch_of(range(3))
    tap, graph, _ = seen(model, lambda: cross_entropy(model, batch), 3)
    assert graph.deepest == tap.edges[:1]


class Branches(nn.Module):
    """Two layers beside each other, one of which the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of two."""
        self.unused(x)
        out: Tensor = torch.tanh(self.a(x)) + self.b(x)
        return out


def test_branches_are_all_deepest_and_what_is_unused_is_not() -> None:
    model = seeded(Branches())
    tap, graph, _ = seen(model, lambda: cross_entropy(model, batch_of(range(3))), 3)
    assert graph.deepest == tap.edges[1:]


class Twice(nn.Module):
    """A layer whose weight is also used outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Its weight twice."""
        out: Tensor = self.out(F.linear(self.layer(x), self.layer.weight))
        return out


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def patch(layer: nn.Module) -> None:
    """Another forward for this one layer."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    layer.forward = lambda x: F.linear(2 * x, weight, bias)


def test_what_is_used_outside_of_its_layer_or_hooked_by_others_is_not_plain() -> None:
    twice, hooked, own, patched = seeded(Twice()), mlp(), mlp(), mlp()
    patch(patched.get_submodule("0"))
    hooked.get_submodule("2").register_forward_hook(doubled)
    for model, expected in ((own, {0, 1, 2, 3}), (twice, {1, 2, 3}), (hooked, {0, 1}), (patched, {2, 3})):
        tap, graph, _ = seen(model, lambda: cross_entropy(model, batch_of(range(3))), 3)  # noqa: B023
        assert plain_blocks(tap, dict.fromkeys(range(4), 1), graph.uses) == expected
        tap.detach()


@pytest.mark.parametrize("kind", ["twice", "hooked", "patched"])
def test_what_is_not_plain_is_right_all_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, slow, batch = (seeded(Twice()) if kind == "twice" else mlp()), list[int](), batch_of(range(4))
    if kind == "hooked":
        model.get_submodule("2").register_forward_hook(doubled)
    if kind == "patched":
        patch(model.get_submodule("0"))
    one_by_one = query_module._one_by_one

    def counted(*args: Any) -> Tensor:
        slow.append(1)
        return one_by_one(*args)

    monkeypatch.setattr(query_module, "_one_by_one", counted)
    assert_close(rows(model, batch), _each(model, batch), 1e-10)
    assert slow == [1]


def rows(model: nn.Module, batch: Any) -> Tensor:
    blocks = find_blocks(model, sgd(model), rank=None)
    return query_rows(model, cross_entropy, batch, blocks, [Basis(None, None) for _ in blocks.blocks])


def _each(model: nn.Module, batch: Any) -> Tensor:
    losses = cross_entropy(model, batch)
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(x, parameters, retain_graph=True) for x in losses]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def test_plain_layers_take_no_gradient_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted, grad = mlp(), list[Any](), torch.autograd.grad

    def watched(out: Tensor, targets: Any, **settings: Any) -> Any:
        wanted.extend(targets)
        return grad(out, targets, **settings)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    rows(model, batch_of(range(4)))
    assert wanted
    assert not any(isinstance(x, Tensor) for x in wanted)


@pytest.mark.parametrize("positions", [1, 3, 40])
def test_a_corner_is_linear_and_of_single_terms(positions: int) -> None:
    g = torch.Generator().manual_seed(0)
    delta, a = (torch.randn(5, positions, d, generator=g) for d in (20, 7))
    by = torch.randn(5, generator=g)
    index = torch.randint(9, (5, positions), generator=g)
    for make in (
        lambda d: Outer(d, a),
        lambda d: Outer(index, d),
        Sum,
        lambda d: Dense(d.sum(1)),
    ):
        first, scaled = corner(make(delta)), corner(make(delta * by[:, None, None]))
        assert_close(scaled, first * by[:, None], 1e-5)
        assert first.shape[1] < 16**3
        assert first.abs().min() > 0


@pytest.mark.parametrize(
    ("by", "rounded", "expected"), [(1e-5, (), True), (0.1, (), False), (0.1, (0,), True), (9.0, (0,), False)]
)
def test_corners_are_alike_up_to_the_rounding_of_their_block(by: float, rounded: Any, expected: bool) -> None:
    x, factors = torch.ones(3, 4), torch.tensor([1.0, -2.0, 0.5])
    second = x * factors[:, None]
    second[0, 0] += by
    assert alike({(0, 4): x}, {(0, 4): second}, factors, rounded) is expected
    assert not alike({(0, 4): x}, {}, factors, rounded)


class Sometimes(nn.Module):
    """Two layers; on demand each sample also sees its neighbour's hidden numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mixes = nn.Linear(3, 4), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        """(B, 2)."""
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.second(hidden + hidden.roll(1, 0) if self.mixes else hidden)
        return out


def test_what_was_found_unmixed_is_checked_at_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other operations, a loss that mixes, and another mode are checked as before; rows are the same either way."""
    sometimes, ends = Sometimes(), list[int]()
    model = seeded(sometimes)
    blocks, unmixed, grad = find_blocks(model, sgd(model), rank=None), set[Any](), torch.autograd.grad

    def watched(out: Tensor, targets: Any, **settings: Any) -> Any:
        ends.append(len(targets))
        return grad(out, targets, **settings)

    monkeypatch.setattr(torch.autograd, "grad", watched)

    def asked(loss: Any = cross_entropy, mode: str = "eval", n: int = 4) -> tuple[list[int], Tensor]:
        ends.clear()
        places = [Basis(None, None) for _ in blocks.blocks]
        got = query_rows(model, loss, batch_of(range(n)), blocks, places, mode=mode, unmixed=unmixed)
        return list(ends), got

    def turned(m: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(m, batch)[torch.tensor([1, 0, 2, 3])]

    _, first = asked()
    assert len(unmixed) == 1
    _, second = asked()
    assert torch.equal(first, second)
    asked(n=6)
    assert len(unmixed) == 1, "of as many samples as one likes"
    asked(mode="train")
    assert len(unmixed) == 2, "another mode is another evaluation"
    for loss, mixes in ((turned, False), (cross_entropy, True)):
        sometimes.mixes = mixes
        passes, actual = asked(loss)
        assert len(passes) > 4, "it was taken for unmixed"
        assert_close(
            actual,
            _each(model, batch_of(range(4)))
            if loss is cross_entropy
            else _each(model, batch_of(range(4)))[[1, 0, 2, 3]],
            1e-10,
        )
    assert len(unmixed) == 2


def test_the_highest_calls_have_none_between_them_and_the_loss() -> None:
    model = mlp()
    tap, graph, _ = seen(model, lambda: cross_entropy(model, batch_of(range(3))), 3)
    assert graph.highest == tap.edges[1:]
    branches = seeded(Branches())
    tap, graph, _ = seen(branches, lambda: cross_entropy(branches, batch_of(range(3))), 3)
    assert graph.highest == tap.edges[1:]


def test_a_loss_that_mixes_is_found_where_the_model_is_known() -> None:
    """A loss with the operations of another one, that takes other samples: the graphs are alike, the rows are not."""
    model, unmixed = mlp(), set[Any]()
    blocks, batch = find_blocks(model, sgd(model), rank=None), batch_of(range(4))
    order = torch.arange(4)

    def picked(m: nn.Module, b: Any) -> Tensor:
        return cross_entropy(m, b)[order]

    places = [Basis(None, None) for _ in blocks.blocks]
    assert_close(query_rows(model, picked, batch, blocks, places, unmixed=unmixed), _each(model, batch), 1e-10)
    order = torch.tensor([2, 0, 1, 3])
    known = set(unmixed)
    actual = query_rows(model, picked, batch, blocks, places, unmixed=unmixed)
    assert_close(actual, _each(model, batch)[order], 1e-10)
    assert unmixed == known, "both have one form"
