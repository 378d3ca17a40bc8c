"""Norms and scales are known by what they compute, under whatever name."""

from collections.abc import Callable

import pytest
import torch
from tests.support.oracles import per_sample_gradients
from torch import Tensor, nn

from backstory.maths.layers import Dense, Sum, rule_for
from backstory.maths.numeric import Scale, scale_of

D = torch.float64


class Layer(nn.Module):
    """Any function of vectors."""

    def __init__(self, forward: Callable[..., Tensor], **sizes: int) -> None:
        super().__init__()
        self._forward, self._names = forward, list(sizes)
        for i, (name, size) in enumerate(sizes.items()):
            start = torch.randn(size, generator=torch.Generator().manual_seed(i), dtype=D)
            self.register_parameter(name, nn.Parameter(start))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x, *(getattr(self, name) for name in self._names))


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


SCALES = {
    "T5": (Layer(lambda x, w: w * rms(x), weight=4), Scale("weight", None, -1), (3, 4)),
    "Gemma": (Layer(lambda x, w: (1 + w) * rms(x), weight=4), Scale("weight", None, -1), (3, 4)),
    "layer scale": (Layer(lambda x, w: x * w, gamma=4), Scale("gamma", None, -1), (4,)),
    "shift first": (Layer(lambda x, b, a: a * (x - x.mean(-1, keepdim=True)) + b, shift=4, alpha=4), Scale("alpha", "shift", -1), (3, 4)),
    "channels first": (Layer(lambda x, w: x * w[:, None, None], weight=4), Scale("weight", None, 1), (4, 2, 3)),
}  # fmt: skip
OTHERS = {
    "exponent": Layer(lambda x, w: x * w.exp(), weight=4),
    "matrix": Layer(lambda x, w: x @ torch.diag(w).roll(1, 0) + x * w.flip(0), weight=4),
    "mixes samples": Layer(lambda x, w: (x - x.mean(0)) * w, weight=4),
    "unequal": Layer(lambda x, w, b: x * w + b, weight=4, bias=1),
    "product": Layer(lambda x, w, v: x * w * v, weight=4, other=4),
    "without use": Layer(lambda x, w: x, weight=4),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_is_found_and_its_rule_is_right(name: str) -> None:
    layer, scale, shape = SCALES[name]
    assert scale_of(layer) == scale
    rule = rule_for(layer)
    assert rule is not None
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(7), dtype=D)
    delta = torch.randn(5, *shape, generator=torch.Generator().manual_seed(8), dtype=D)
    expected = per_sample_gradients(layer, (x,), delta)
    with torch.no_grad():
        actual = rule(layer, (x,), delta)
    assert actual.keys() == expected.keys()
    for key, part in actual.items():
        assert isinstance(part, Sum | Dense)
        row = part.values.sum(1) if isinstance(part, Sum) else part.grads
        torch.testing.assert_close(row, expected[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_no_scale(name: str) -> None:
    assert scale_of(OTHERS[name]) is None


def test_a_trial_leaves_buffers_and_parameters_as_they_are() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.calls, Tensor)
            self.calls += 1
            return x * self.weight

    layer = Counting()
    assert scale_of(layer) == Scale("weight", None, -1)
    assert float(layer.get_buffer("calls")) == 0
    assert torch.equal(layer.weight, torch.ones(4))
