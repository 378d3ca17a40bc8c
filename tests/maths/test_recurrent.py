"""Recurrent layers unrolled: torch's outputs, and the gradients of one backward pass per sample."""

from collections.abc import Callable

import pytest
import torch
from tests.support.loops import generator
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.maths.recurrent import can_unroll, gradients, unroll

D, B, S, F, H = torch.float64, 3, 5, 4, 6
MODULES: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(F, H, batch_first=True),
    "LSTM, two layers, both directions": lambda: nn.LSTM(F, H, 2, bidirectional=True, batch_first=True),
    "LSTM, no bias": lambda: nn.LSTM(F, H, bias=False, batch_first=True),
    "GRU": lambda: nn.GRU(F, H, batch_first=True),
    "GRU, two layers, both directions, no bias": lambda: nn.GRU(F, H, 2, bias=False, bidirectional=True, batch_first=True),
    "RNN": lambda: nn.RNN(F, H, 2, batch_first=True),
    "RNN, relu": lambda: nn.RNN(F, H, nonlinearity="relu", bidirectional=True, batch_first=True),
}  # fmt: skip


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=D)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_one_backward_per_sample(name: str, given: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().to(D)
    parts = module.num_layers * (2 if module.bidirectional else 1)
    x = normal(B, S, F, seed=1)
    start = [normal(B, parts, H, seed=2 + i) for i in range(2 if isinstance(module, nn.LSTM) else 1)] if given else []
    run = unroll(module, dict(module.named_parameters()), x, start)
    states = tuple(s.transpose(0, 1) for s in start)
    whole = module(x, (states if isinstance(module, nn.LSTM) else states[0]) if given else None)
    ends = whole[1] if isinstance(whole[1], tuple) else (whole[1],)
    torch.testing.assert_close(run.outputs, whole[0], rtol=1e-12, atol=1e-12)
    for actual, expected in zip(run.states, ends, strict=True):
        torch.testing.assert_close(actual.transpose(0, 1), expected, rtol=1e-12, atol=1e-12)
    weights = [normal(*run.outputs.shape, seed=7), *(normal(*s.shape, seed=8 + i) for i, s in enumerate(run.states))]
    zeros = [z for layer in run.layers for z in (layer.at_inputs, layer.at_hidden)]
    back = torch.autograd.grad((run.outputs, *run.states), zeros, weights)
    rows = gradients(run.layers, back)
    for z in range(B):
        terms = [(whole[0][z] * weights[0][z]).sum()]
        terms += [(e[:, z] * w[z]).sum() for e, w in zip(ends, weights[1:], strict=True)]
        alone = torch.autograd.grad(torch.stack(terms).sum(), list(module.parameters()), retain_graph=True)
        for (key, _), grad in zip(module.named_parameters(), alone, strict=True):
            assert_close(rows[key][z], grad, 1e-10, key)


def test_only_what_is_written_here_is_unrolled() -> None:
    class Own(nn.LSTM):
        pass

    assert can_unroll(nn.LSTM(2, 3))
    assert not can_unroll(nn.LSTM(2, 3, proj_size=2))
    assert not can_unroll(Own(2, 3))
    assert not can_unroll(nn.LSTMCell(2, 3))
