"""Every layer rule against one backward pass for each sample."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.oracles import assert_close, per_sample_gradients
from torch import Tensor, nn

from backstory.errors import UnsupportedError
from backstory.maths.layers import RULES, Contribution, Dense, Outer, Patches, Sum, count_positions, linear, rule_for
from backstory.maths.projection import Basis, Shape, project, project_groups

B = 4


def conv1d(**options: object) -> nn.Module:
    return nn.Conv1d(4, 6, 3, **options)  # type: ignore[arg-type]


def conv2d(**options: object) -> nn.Module:
    return nn.Conv2d(4, 6, (3, 2), **options)  # type: ignore[arg-type]


CASES: dict[str, tuple[nn.Module, *tuple[tuple[int, ...], ...]]] = {  # module, shape of one sample of each input
    "linear": (nn.Linear(5, 3), (5,)),
    "linear, sequence": (nn.Linear(5, 3), (7, 5)),
    "linear, two sequence dimensions": (nn.Linear(5, 3), (2, 7, 5)),
    "linear, no bias": (nn.Linear(5, 3, bias=False), (7, 5)),
    "conv1d": (conv1d(), (4, 9)),
    "conv1d, stride that leaves a rest": (conv1d(stride=3, padding=1), (4, 10)),
    "conv1d, dilation": (conv1d(dilation=2, padding=2), (4, 9)),
    "conv1d, same": (conv1d(padding="same", dilation=2), (4, 9)),
    "conv1d, circular": (conv1d(padding=2, padding_mode="circular"), (4, 9)),
    "conv1d, depthwise": (nn.Conv1d(4, 4, 3, groups=4), (4, 9)),
    "conv2d": (conv2d(), (4, 6, 7)),
    "conv2d, no bias": (conv2d(bias=False), (4, 6, 7)),
    "conv2d, stride and padding": (conv2d(stride=(2, 3), padding=(1, 2)), (4, 6, 7)),
    "conv2d, valid by name": (conv2d(padding="valid"), (4, 6, 7)),
    "conv2d, same with an even kernel": (conv2d(padding="same"), (4, 6, 7)),
    "conv2d, circular": (conv2d(padding=(1, 0), padding_mode="circular"), (4, 6, 7)),
    "conv2d, reflect": (conv2d(padding=(2, 1), padding_mode="reflect", dilation=(1, 2)), (4, 6, 7)),
    "conv2d, replicate": (conv2d(padding=(0, 1), padding_mode="replicate"), (4, 6, 7)),
    "conv2d, groups": (conv2d(groups=2, stride=2), (4, 6, 7)),
    "conv2d, depthwise with multiplier": (nn.Conv2d(3, 6, 3, groups=3, bias=False), (3, 6, 7)),
    "layer norm": (nn.LayerNorm(5), (7, 5)),
    "layer norm, no sequence": (nn.LayerNorm(5), (5,)),
    "layer norm, two dimensions": (nn.LayerNorm((3, 5)), (7, 3, 5)),
    "layer norm, no bias": (nn.LayerNorm(5, bias=False), (7, 5)),
    "rms norm": (nn.RMSNorm(5), (7, 5)),
    "rms norm, two dimensions and eps": (nn.RMSNorm((3, 5), eps=0.1), (3, 5)),
    "group norm": (nn.GroupNorm(2, 6, eps=0.1), (6, 4, 5)),
    "batch norm 1d in eval": (nn.BatchNorm1d(6).eval(), (6,)),
    "batch norm 2d in eval": (nn.BatchNorm2d(6).eval(), (6, 4, 5)),
}
EMBEDDINGS = {
    "embedding": (nn.Embedding(6, 3), (8,)),  # 8 tokens of 6: some must repeat
    "embedding, padding": (nn.Embedding(6, 3, padding_idx=2), (8,)),
    "embedding, two dimensions": (nn.Embedding(6, 3), (2, 5)),
    "embedding, one token": (nn.Embedding(6, 3), ()),
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(contribution: Contribution | Tensor, shape: torch.Size) -> Tensor:
    if isinstance(contribution, Tensor):
        return contribution
    if isinstance(contribution, Sum):
        return sum(contribution.values.unbind(1), torch.zeros(())).reshape(-1, *shape)
    contribution = contribution.outer() if isinstance(contribution, Patches) else contribution
    if not isinstance(contribution, Outer):
        return contribution.grads.reshape(-1, *shape)
    left, right = contribution
    left = left if left.is_floating_point() else F.one_hot(left, shape[0]).double()
    return torch.stack([l.T @ r for l, r in zip(left, right, strict=True)]).reshape(len(left), *shape)


def randomise(module: nn.Module) -> nn.Module:
    """Weights and running statistics that are not 0 or 1, so that none can be forgotten."""
    module.double()
    for i, (name, value) in enumerate(module.state_dict().items()):
        if value.is_floating_point():
            value.copy_(normal(*value.shape, seed=i).abs() + 0.5 if "running" in name else normal(*value.shape, seed=i))
    return module


def random_inputs(shapes: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(normal(B, *shape, seed=10 * i) for i, shape in enumerate(shapes))


def check(module: nn.Module, *inputs: Tensor) -> None:
    rule = rule_for(module)
    assert rule is not None
    with torch.no_grad():
        delta = normal(*module(*inputs).shape, seed=1)
        actual = rule(module, inputs, delta)
    expected = per_sample_gradients(module, inputs, delta)
    assert actual.keys() == expected.keys()
    for name, value in module.named_parameters():
        assert_close(
            dense(actual[name], value.shape), expected[name], 1e-10,
            f"`{name}`: a ratio of {B} or 1/{B} is the batch size; errors in some entries only are the order of "
            "patches, padding, or positions summed over samples.",
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own, about speed
@pytest.mark.parametrize("name", CASES)
def test_rule_equals_one_backward_per_sample(name: str) -> None:
    module, *shapes = CASES[name]
    check(randomise(module), *random_inputs(shapes))


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embedding_equals_one_backward_per_sample(name: str) -> None:
    module, shape = EMBEDDINGS[name]
    index = torch.randint(6, (B, *shape), generator=torch.Generator().manual_seed(0))
    check(module.double(), index)
    check(module, index.int())


CONVOLUTIONS = [name for name in CASES if name.startswith("conv")]
SIDES = {  # ranks of the two sides: small ones shrink the sides first, large ones write the gradients out
    "narrow": (2, 3),
    "wide": (6, 12),
    "all of the left": (None, 3),
    "all of the right": (2, None),
    "a core": (2, 3),
    "chosen coordinates": (2, 3),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolutions_row_is_vec_of_left_gradient_right(name: str, sides: str) -> None:
    module, *sizes = CASES[name]
    (x,) = random_inputs(sizes)
    randomise(module)
    delta = normal(*module(x).shape, seed=1)
    G = per_sample_gradients(module, (x,), delta)["weight"].flatten(2)  # (B, C_out, C_in · kernel)
    d_out, d_in = G.shape[1:]
    L, R = (
        None if r is None else normal(d, min(r, d), seed=r) for d, r in zip((d_out, d_in), SIDES[sides], strict=True)
    )
    if sides == "chosen coordinates":
        L, R = torch.tensor([3, 0]), torch.tensor([1, 0, 2])
    left, right = (
        torch.eye(d, dtype=torch.float64) if side is None else side if side.is_floating_point() else torch.eye(d).double()[:, side]
        for d, side in ((d_out, L), (d_in, R))
    )  # fmt: skip
    core = torch.tensor([4, 1]) if sides == "a core" else None
    expected = torch.einsum("oi,bod,dj->bij", left, G, right).flatten(1)
    expected = expected if core is None else expected[:, core]
    shape, basis = (
        Shape(d_out, d_in, left.shape[1], right.shape[1], 0 if core is None else len(core)),
        Basis(L, R, core),
    )
    rule = rule_for(module)
    assert rule is not None
    part = rule(module, (x,), delta)["weight"]
    assert not isinstance(part, Tensor)
    causes = "Right numbers in the wrong places: the order of the filters' entries; else stride, padding or dilation."
    assert_close(project(part, shape, basis), expected, 1e-10, causes)
    positions = project_groups(part, shape, basis, 3)
    assert_close(positions.sum(1), expected, 1e-10, "groups of positions")
    assert isinstance(part, Dense) or count_positions(part) == delta.shape[2:].numel()


CHANNELS_FIRST = (nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.BatchNorm2d)
APART = [name for name in CASES if "groups" not in name and "depthwise" not in name]  # these are contracted at once


def alone(module: nn.Module, delta: Tensor, n_features: int, t: int) -> Tensor:
    """∂L/∂s at position t only: positions are all dimensions between the batch and the features, in order."""
    kept = delta.movedim(1, -1) if isinstance(module, CHANNELS_FIRST) else delta
    size = kept.shape[1 : kept.dim() - n_features].numel()
    mask = torch.zeros(size, dtype=delta.dtype)
    mask[t] = 1.0
    kept = kept * mask.reshape(*kept.shape[1 : kept.dim() - n_features], *[1] * n_features)
    return kept.movedim(-1, 1) if isinstance(module, CHANNELS_FIRST) else kept


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", APART)
def test_positions_are_those_of_the_output_and_the_same_for_all_parameters(name: str) -> None:
    """What a rule says of position t is the gradient when all others have δ = 0: groups of positions rest on it."""
    module, *shapes = CASES[name]
    rule, inputs = rule_for(randomise(module)), random_inputs(shapes)
    assert rule is not None
    with torch.no_grad():
        delta = normal(*module(*inputs).shape, seed=1)
        actual = rule(module, inputs, delta)
    n_features = len(getattr(module, "normalized_shape", (0,)))
    counts = {
        part.right.shape[1] if isinstance(part, Outer) else part[0].shape[1]
        for part in actual.values()
        if isinstance(part, Outer | Sum)
    }
    for t in range(min(counts, default=0)):
        expected = per_sample_gradients(module, inputs, alone(module, delta, n_features, t))
        for own, part in actual.items():
            if isinstance(part, Outer | Sum):
                here = type(part)(*(y[:, t : t + 1] for y in part))
                assert_close(dense(here, expected[own].shape[1:]), expected[own], 1e-10, f"`{own}` at position {t}")
    assert len(counts) <= 1, f"positions {counts}: the parameters of one call disagree"


def test_a_vector_with_one_position_has_nothing_to_sum() -> None:
    for positions, kind in (((7,), Sum), ((), Dense), ((1,), Dense)):
        layers: list[nn.Module] = [nn.Linear(5, 5), nn.LayerNorm(5)]
        for layer in layers:
            rule = rule_for(layer)
            assert rule is not None
            with torch.no_grad():
                actual = rule(layer, (torch.zeros(B, *positions, 5),), torch.zeros(B, *positions, 5))
            assert isinstance(actual["bias"], kind), f"{layer} with positions {positions}"


def test_a_norm_without_parameters_has_no_gradients() -> None:
    module = nn.LayerNorm(5, elementwise_affine=False)
    rule = rule_for(module)
    assert rule is not None
    assert rule(module, (normal(B, 5, seed=0),), normal(B, 5, seed=1)) == {}


REFUSED = {
    "embedding with max_norm": (nn.Embedding(6, 3, max_norm=1.0), "max_norm"),
    "embedding scaled by frequency": (nn.Embedding(6, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "sparse embedding": (nn.Embedding(6, 3, sparse=True), "sparse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_over_samples_is_refused(name: str) -> None:
    module, word = REFUSED[name]
    x, delta = torch.zeros(B, 2, dtype=torch.long), torch.zeros(B, 2, 3)
    rule = rule_for(module)
    assert rule is not None
    with pytest.raises(UnsupportedError, match=word):
        rule(module, (x,), delta)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False).eval()])
def test_batch_norm_with_the_statistics_of_the_batch(layer: nn.Module) -> None:
    """Each sample scaled and shifted by a copy of the parameters of its own."""
    x, delta = normal(B, 3, 2, 2, seed=0), normal(B, 3, 2, 2, seed=1)
    own = torch.ones(B, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    shift = torch.zeros_like(own, requires_grad=True)
    normed = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    (own * normed + shift).backward(delta)
    rule = rule_for(randomise(layer))
    assert rule is not None
    actual = rule(layer, (x,), delta)
    for name, expected in (("weight", own.grad), ("bias", shift.grad)):
        assert expected is not None
        assert_close(dense(actual[name], torch.Size([3])), expected.flatten(1), 1e-10)


class Special(nn.Linear):
    """A user's own layer."""


class Doubled(nn.Linear):
    """With a forward of its own that is another function."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Written(nn.Linear):
    """With a forward of its own that is the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Turned(nn.LayerNorm):
    """With features in the second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_a_rule_is_taken_where_the_module_computes_what_it_stands_for() -> None:
    assert rule_for(Written(3, 4)) is linear
    assert rule_for(Doubled(3, 4)) is None
    check(randomise(Turned(4)), normal(B, 4, 3, seed=0))


def test_the_nearest_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> dict[str, Contribution]:
        return {}

    assert rule_for(Special(2, 2)) is linear
    assert rule_for(nn.ReLU()) is None
    monkeypatch.setitem(RULES, Special, own)
    assert rule_for(Special(2, 2)) is own
    assert rule_for(nn.Linear(2, 2)) is linear
