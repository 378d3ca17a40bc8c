r"""Per-sample gradients of LSTM, GRU and RNN, unrolled over time for the whole batch.

With the pre-activations z_t = W_ih a_t + b_ih + W_hh h_{t−1} + b_hh and δ_t = ∂L/∂z_t, which one backward pass through the unrolled
layer gives for all samples at once,

    ∂L/∂W_ih⁽ᵇ⁾ = Σ_t δ_bt a_btᵀ      ∂L/∂W_hh⁽ᵇ⁾ = Σ_t δ_bt h_{b,t−1}ᵀ      ∂L/∂b⁽ᵇ⁾ = Σ_t δ_bt

A GRU multiplies the part of z that comes from h by a gate before it adds the other, so that the two parts have a δ each.

Shapes:  B samples, S steps, F inputs, H hidden, G gates × H, K cotangents.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Layer(NamedTuple):
    """One layer in one direction: what it was given, and where its gradients come back to."""

    suffix: str  # of its parameters' names
    inputs: Tensor  # (B, S, F)
    hidden: Tensor  # (B, S, H) before each step
    at_inputs: Tensor  # (B, S, G) zeros that were added to W_ih a + b_ih
    at_hidden: Tensor  # (B, S, G) to W_hh h + b_hh; the same as `at_inputs` where the two are added up


class Unrolled(NamedTuple):
    """The outputs of a recurrent module, with their graph."""

    outputs: Tensor  # (B, S, D H)
    states: tuple[Tensor, ...]  # (B, layers × D, H) each: h, and of an LSTM c
    layers: list[Layer]


def can_unroll(module: nn.Module) -> bool:
    """Whether the module is one of torch's, of a kind that is written here."""
    return type(module) in (nn.LSTM, nn.GRU, nn.RNN) and not getattr(module, "proj_size", 0)


def unroll(module: nn.RNNBase, weights: Mapping[str, Tensor], x: Tensor, start: Sequence[Tensor]) -> Unrolled:
    """The module with these weights on `x` (B, S, F), from states (B, layers × D, H); all samples at once."""
    directions = 2 if module.bidirectional else 1
    layers: list[Layer] = []
    ends: list[tuple[Tensor, ...]] = []
    for n in range(module.num_layers):
        sides = []
        for d in range(directions):
            begin = tuple(s[:, n * directions + d] for s in start) or _zeros(module, x)
            out, end, layer = _pass(module, weights, f"_l{n}" + "_reverse" * d, x, begin)
            sides.append(out)
            ends.append(end)
            layers.append(layer)
        x = torch.cat(sides, -1)
    return Unrolled(x, tuple(torch.stack(s, 1) for s in zip(*ends, strict=True)), layers)


def gradients(layers: Sequence[Layer], deltas: Sequence[Tensor]) -> dict[str, Tensor]:
    """Per-sample gradients of all parameters, from those that came back to each layer's two zeros, in turn."""
    out: dict[str, Tensor] = {}
    pairs = zip(deltas[::2], deltas[1::2], strict=True)
    for layer, (of_inputs, of_hidden) in zip(layers, pairs, strict=True):
        out[f"weight_ih{layer.suffix}"] = of_inputs.mT @ layer.inputs.detach()
        out[f"weight_hh{layer.suffix}"] = of_hidden.mT @ layer.hidden.detach()
        out[f"bias_ih{layer.suffix}"] = of_inputs.sum(1)
        out[f"bias_hh{layer.suffix}"] = of_hidden.sum(1)
    return out


def _zeros(module: nn.RNNBase, x: Tensor) -> tuple[Tensor, ...]:
    zero = x.new_zeros(len(x), module.hidden_size)
    return (zero, zero) if isinstance(module, nn.LSTM) else (zero,)


def _pass(
    module: nn.RNNBase, weights: Mapping[str, Tensor], suffix: str, x: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...], Layer]:
    """One layer in one direction: outputs (B, S, H), the state at the end, and the layer."""
    w_ih, w_hh = weights[f"weight_ih{suffix}"], weights[f"weight_hh{suffix}"]
    from_x = x @ w_ih.T
    from_x = from_x + weights[f"bias_ih{suffix}"] if module.bias else from_x
    at_inputs = torch.zeros_like(from_x).requires_grad_()
    at_hidden = torch.zeros_like(from_x).requires_grad_() if isinstance(module, nn.GRU) else at_inputs
    outputs, before = [x] * x.shape[1], [x] * x.shape[1]
    steps = range(x.shape[1])
    for t in reversed(steps) if suffix.endswith("_reverse") else steps:
        before[t] = state[0]
        from_h = state[0] @ w_hh.T
        from_h = from_h + weights[f"bias_hh{suffix}"] if module.bias else from_h
        from_h = from_h + at_hidden[:, t] if at_hidden is not at_inputs else from_h
        state = _step(module, from_x[:, t] + at_inputs[:, t], from_h, state)
        outputs[t] = state[0]
    return torch.stack(outputs, 1), state, Layer(suffix, x, torch.stack(before, 1), at_inputs, at_hidden)


def _step(module: nn.RNNBase, from_x: Tensor, from_h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step of time, in torch's order of gates."""
    if isinstance(module, nn.LSTM):
        i, f, g, o = (from_x + from_h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if isinstance(module, nn.GRU):
        (r, z, n), (hr, hz, hn) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        gate = (z + hz).sigmoid()
        return ((1 - gate) * (n + (r + hr).sigmoid() * hn).tanh() + gate * state[0],)
    total = from_x + from_h
    return (total.relu() if module.nonlinearity == "relu" else total.tanh(),)
