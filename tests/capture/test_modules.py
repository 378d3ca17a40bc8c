"""Which parameters are recorded; what is missing is named, with its share and the way out."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backstory
from backstory.capture.modules import find_blocks
from backstory.errors import CoverageError, UsageError
from backstory.maths.layers import RULES


class Scaled(nn.Module):
    """A layer with a parameter of its own, which no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.exp()


@pytest.fixture
def _registry() -> Iterator[None]:
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def model() -> nn.Module:
    parts = {"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 3)}
    return nn.ModuleDict({"body": nn.ModuleDict(parts), "out": nn.Linear(3, 2, bias=False)})


def actual(net: nn.Module, **settings: Any) -> list[str]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return [b.name for b in find_blocks(net, optimizer, **{"rank": None, **settings}).blocks]


ALL = ["body.embed.weight", "body.norm.weight", "body.norm.bias", "body.head.weight", "body.head.bias", "out.weight"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ALL),
        (["out"], ["out.weight"]),
        (["body"], ALL[:5]),
        (["body.head.bias"], ["body.head.bias"]),
        (["!body"], ["out.weight"]),
        (["body", "!body.head", "!body.norm.bias"], ALL[:2]),
        (["!body.hea?"], [*ALL[:3], "out.weight"]),
        (["!bod*"], ["out.weight"]),
        (["body.*"], ALL[:5]),
        (["*.bias"], ["body.norm.bias", "body.head.bias"]),
        ([nn.LayerNorm, "out"], ["body.norm.weight", "body.norm.bias", "out.weight"]),
        (["!body.embed"], ALL[1:]),
        (["!*.bias", nn.Linear], ["body.head.weight", "out.weight"]),
        (lambda name, module: isinstance(module, nn.Linear) and name.endswith("weight"), ["body.head.weight", "out.weight"]),
    ],
)  # fmt: skip
def test_layers_are_chosen_by_name_type_and_function(layers: Any, expected: list[str]) -> None:
    assert actual(model(), layers=layers) == expected


def test_a_choice_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"no trained parameter would be recorded. Check `layers=`"):
        actual(model(), layers=["!body", "!out"])


def test_a_name_means_a_module_with_all_below_it_and_no_longer_name() -> None:
    net = nn.ModuleDict({"enc": nn.Sequential(nn.Linear(2, 2, bias=False)), "enc2": nn.Linear(2, 2, bias=False)})
    assert actual(net, layers=["enc"]) == ["enc.0.weight"]
    assert actual(net, layers=["!enc"]) == ["enc2.weight"]
    assert (
        actual(nn.DataParallel(net), layers=["!enc"])
        == actual(nn.DataParallel(net), layers=["!module.enc"])
        == ["enc2.weight"]
    )
    assert actual(nn.Linear(2, 2), layers=["!bias"]) == actual(nn.Linear(2, 2), layers=["weight"]) == ["weight"]
    assert actual(nn.Linear(2, 2), layers=lambda name, module: name == "bias") == ["bias"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["!body.hed"], r"layers contains '!body.hed'.*no module or parameter of that name.*Did you mean: body.head"),
        (["out", "body.norm.wieght"], r"contains 'body.norm.wieght'.*Did you mean: body.norm.weight"),
        (["!norm"], r"contains '!norm'.*Did you mean: body.norm"),
        (["xyz"], r"contains 'xyz'.*The model has body, out\."),
        (["!"], r"contains '!'.*The model has body, out\."),
        ("out", r"layers must be a list of names and types, got 'out'. Pass \['out'\]"),
    ],
)  # fmt: skip
def test_a_name_that_the_model_does_not_have_is_refused(layers: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        actual(model(), layers=layers)


def test_patterns_may_match_nothing_and_frozen_modules_may_be_named() -> None:
    assert actual(model(), layers=["!*lora*"]) == ALL
    net = model()
    net.get_submodule("out").requires_grad_(False)
    assert actual(net, layers=["!out"]) == ALL[:5]


def test_what_is_left_out_by_choice_is_listed() -> None:
    net = model()
    blocks = find_blocks(net, torch.optim.SGD(net.parameters(), lr=0.1), rank=None, layers=["!out"])
    assert blocks.left_out == ["out.weight"]


def test_an_uncovered_parameter_is_named_with_its_share_and_the_ways_out() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), Scaled())
    with pytest.raises(CoverageError) as caught:
        actual(net, uncovered="error")
    message = str(caught.value)
    assert "1.gain  33.3% of the trained parameters" in message
    for way in ("backstory.register", "layers=['!name']", "uncovered='skip'", "uncovered='general'"):
        assert way in message
    assert (
        actual(net, layers=["!1.gain"]) == actual(net, layers=["!1"]) == actual(net, uncovered="skip") == ["0.weight"]
    )


class Child(nn.MultiheadAttention):
    """Of attention."""


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, Child])
def test_attention_is_uncovered_with_the_layer_below_it(kind: type[nn.MultiheadAttention]) -> None:
    """Its forward hands `out_proj.weight` to a function: a rule for `nn.Linear` never sees it used."""
    with pytest.raises(CoverageError, match=r"(?s)in_proj_weight.*in_proj_bias.*out_proj.weight.*out_proj.bias"):
        actual(kind(4, 2), uncovered="error")
    net = nn.Sequential(nn.Linear(4, 4), kind(4, 2, kdim=3, vdim=3, add_bias_kv=True))
    assert actual(net, uncovered="skip") == actual(net, layers=["!1"]) == ["0.weight", "0.bias"]


def test_layers_below_a_bare_parameter_are_called_as_ever() -> None:
    class Block(nn.Module):
        """A parameter of its own, and two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.gain, self.up, self.down = nn.Parameter(torch.ones(2)), nn.Linear(2, 3), nn.Linear(3, 2, bias=False)

    assert (
        actual(Block(), uncovered="skip")
        == actual(Block(), layers=["!gain"])
        == ["up.weight", "up.bias", "down.weight"]
    )


def test_an_optimizer_that_trains_more_than_the_model_is_refused() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(CoverageError, match=r"2 parameters that are not in the model.*\(1, 3\).*Record a module"):
        find_blocks(net, optimizer, rank=None)


def test_parameters_that_the_optimizer_does_not_train_are_no_blocks() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [net[1].weight]}, {"params": [net[0].weight, net[0].bias]}], lr=0.1)
    blocks = find_blocks(net, optimizer, rank=None)
    assert [(b.name, b.group) for b in blocks.blocks] == [("0.bias", 1), ("1.weight", 0)]
    assert blocks.left_out == []
    assert blocks.elsewhere == ["1.bias"]  # trained by someone else, perhaps: answers must name it


def test_tied_weights_are_one_block_with_two_owners() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    blocks = find_blocks(net, torch.optim.SGD(net.parameters(), lr=0.1), rank=None)
    assert [b.name for b in blocks.blocks] == ["embed.weight"]
    assert {type(m): numbers for m, (_, numbers) in blocks.owners.items()} == {
        nn.Embedding: {"weight": 0},
        nn.Linear: {"weight": 0},
    }


@pytest.mark.parametrize("layers", [["head"], ["embed"], ["head.weight"], ["h*"], [nn.Linear], ["head", "embed"]])
def test_tied_weights_are_chosen_and_left_out_as_a_whole_by_any_name(layers: list[Any]) -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    blocks = find_blocks(net, optimizer, rank=None, layers=layers)
    assert {net["embed"], net["head"]} <= blocks.owners.keys(), "rows of one use alone would not add up"
    if isinstance(layers[0], str):
        assert [b.name for b in blocks.blocks] == ["embed.weight"]
        assert actual(net, layers=[f"!{layers[0]}"]) == ["body.weight", "body.bias"]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (None, [20, 4, 4, 12, 3, 6]),
        (2, [4, 4, 4, 4, 3, 4]),
        ((3, 1), [3, 4, 4, 3, 3, 2]),
        ({"out*": 1, "*": 2}, [4, 4, 4, 4, 3, 1]),
    ],
)
def test_ranks_are_one_number_a_pair_or_patterns(rank: Any, expected: list[int]) -> None:
    net = model()
    blocks = find_blocks(net, torch.optim.SGD(net.parameters(), lr=0.1), rank=rank)
    assert [(b.name, b.shape.dims) for b in blocks.blocks] == list(zip(ALL, expected, strict=True))


@pytest.mark.parametrize(
    ("rank", "most", "expected"),
    [
        (None, None, [20, 4, 4, 12, 3, 6]),
        (None, 49, [20, 4, 4, 12, 3, 6]),
        (None, 48, [20, 4, 4, 12, 3, 5]),
        (None, 20, [8, 2, 1, 5, 1, 3]),
        (2, 12, [3, 2, 2, 2, 1, 2]),
        (2, 1, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_all_parameters_together_have_no_more_coordinates_than_asked_for(
    rank: Any, most: int | None, expected: list[int]
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    blocks = find_blocks(net, optimizer, rank=rank, most=most).blocks
    assert [(b.name, b.shape.dims) for b in blocks] == list(zip(ALL, expected, strict=True))
    free = find_blocks(net, optimizer, rank=rank).blocks
    assert [b.shape._replace(core=0) for b in blocks] == [b.shape for b in free], "sides are those of the rank"


def test_ranks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no pattern in rank= matches 'body.embed.weight'. Add one"):
        actual(model(), rank={"out*": 1})
    with pytest.raises(UsageError, match=r"rank must be at least 1, got 0 for 'body.embed.weight'"):
        actual(model(), rank=0)


def scaled_rule(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
    return {"gain": inputs[0] * delta}


@pytest.mark.usefixtures("_registry")
def test_a_registered_layer_is_covered_and_so_are_its_children() -> None:
    backstory.register(Scaled, scaled_rule)

    class Child(Scaled):
        """Inherits the rule."""

    assert actual(nn.Sequential(nn.Linear(2, 2), Child())) == ["0.weight", "0.bias", "1.gain"]


def test_only_modules_can_be_registered() -> None:
    for thing in (Scaled(), int, "Linear"):
        with pytest.raises(UsageError, match=r"must be a subclass of torch.nn.Module"):
            backstory.register(thing, scaled_rule)  # type: ignore[arg-type]
    assert Scaled not in RULES
