r"""Per-sample gradients of one layer call, from what backprop already computed.

For s = W a and δ = ∂L/∂s, the gradient of sample b is Σ_t δ_bt a_btᵀ: no second backward pass.
Every rule is one function of the same form,

    rule(module, inputs, delta) -> {local parameter name: Outer, Patches, Sum, Dense, or a tensor meant as Dense}

An `Outer` keeps the two factors apart, so that a projection can shrink each of them before they meet;
positions t are summed *inside* one sample (or a group of its positions) only. `Patches` are an `Outer` whose right side, the patches
of a convolution's inputs, is not written out: k² times as many numbers as the inputs. A new layer type is one function in `RULES`.

Shapes:  B samples, S positions (every dimension between batch and features, flattened), d features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from ..errors import UnsupportedError
from .numeric import Scale, called_with, computes_as, keeps_forward, scale_of


class Outer(NamedTuple):
    """Gradient Σ_t left_t right_tᵀ of a matrix parameter; an integer `left` (B, S) stands for one-hot rows."""

    left: Tensor  # (B, S, d_out), or (B, S) indices below d_out
    right: Tensor  # (B, S, d_in)


class Window(NamedTuple):
    """How a convolution in two dimensions looks at its inputs."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]  # as `F.pad` takes it
    mode: str  # of the padding, likewise

    def padded(self, x: Tensor) -> Tensor:
        """Inputs (B, C, H, W) with what lies around them."""
        return F.pad(x, list(self.padding), mode=self.mode) if any(self.padding) else x

    def convolve(self, x: Tensor, filters: Tensor) -> Tensor:
        """Outputs (B, r, H_out, W_out) of r filters (r, C, *kernel)."""
        left, right, top, bottom = self.padding
        if self.mode == "constant" and (left, top) == (right, bottom):  # it needs no copy
            return F.conv2d(x, filters, stride=self.stride, dilation=self.dilation, padding=(top, left))
        return F.conv2d(self.padded(x), filters, stride=self.stride, dilation=self.dilation)


class Patches(NamedTuple):
    """Gradient Σ_t left_t right_tᵀ of a convolution's weight, where right_t (C_in · kernel) is what position t saw of the inputs."""

    window: Window
    left: Tensor  # (B, C_out, H_out, W_out)
    inputs: Tensor  # (B, C_in, H, W)

    def outer(self) -> Outer:
        """The same with the patches written out, in the order of `weight.flatten(1)`."""
        window = self.window
        x = F.unfold(window.padded(self.inputs), window.kernel, dilation=window.dilation, stride=window.stride)
        return Outer(self.left.flatten(2).mT, x.mT)

    def dense(self, groups: int = 1) -> Tensor:
        """Each sample's gradient (B, C_out, C_in / groups, *kernel): one convolution, each sample a group of its channels."""
        x, (B, C_out) = self.window.padded(self.inputs), self.left.shape[:2]
        size = (B * C_out, x.shape[1] // groups, *self.window.kernel)
        together, delta = x.reshape(1, -1, *x.shape[2:]), self.left.reshape(1, -1, *self.left.shape[2:])
        grads: Tensor = conv2d_weight(
            together, size, delta, stride=self.window.stride, dilation=self.window.dilation, groups=B * groups
        )
        return grads.reshape(B, C_out, *size[1:])


class Sum(NamedTuple):
    """Gradient Σ_t values_t of a vector parameter, its positions still apart."""

    values: Tensor  # (B, S, d)


class Dense(NamedTuple):
    """Gradient of any parameter, one for each sample."""

    grads: Tensor  # (B, *parameter.shape)


Plain = Outer | Sum | Dense  # made of tensors with samples first, positions apart where they are summed
Contribution = Plain | Patches
Rule = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Mapping[str, Contribution | Tensor]]


def linear(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """s = W a + b."""
    left = delta.reshape(len(delta), -1, delta.shape[-1])  # (B, S, d_out)
    out: dict[str, Contribution] = {"weight": Outer(left, _positions(inputs[0]))}
    if layer.bias is not None:
        out["bias"] = _vector(left)
    return out


def linear_transposed(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """s = a W + b, as in GPT-2: the weight is (d_in, d_out), so that the two factors change places."""
    right = _positions(delta)  # (B, S, d_out)
    return {"weight": Outer(_positions(inputs[0]), right), "bias": _vector(right)}


def conv(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """1-d and 2-d convolution: a linear map of the patches; with groups of channels the gradient is written out."""
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    patches = _patches(layer, inputs[0], delta)
    single = patches.left.shape[2:].numel() == 1  # one position: the gradient is one outer product
    out: dict[str, Contribution] = {"weight": patches.outer() if single else patches}
    if layer.groups > 1:
        out["weight"] = Dense(patches.dense(layer.groups).reshape(len(delta), *layer.weight.shape))
    if layer.bias is not None:
        out["bias"] = _vector(delta.flatten(2).mT)
    return out


def embedding(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """Row look-up: Σ_t 1_{i_t} δ_tᵀ; the padding row has no gradient, as in torch."""
    assert isinstance(layer, nn.Embedding)
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise UnsupportedError(
            "nn.Embedding with max_norm, scale_grad_by_freq or sparse=True is not supported. Use a plain "
            "nn.Embedding, or freeze it and exclude it with `layers=`."
        )
    index = inputs[0].reshape(len(delta), -1).long()  # (B, S); int32 tokens cannot be made one-hot
    right = delta.reshape(len(delta), -1, delta.shape[-1])  # (B, S, d)
    if layer.padding_idx is not None:
        right = right * (index != layer.padding_idx).unsqueeze(-1)
    return {"weight": Outer(index, right)}


def scaled_embedding(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """A row look-up, times the constant `embed_scale`."""
    scale = layer.embed_scale
    assert isinstance(scale, Tensor | float | int)
    return embedding(layer, inputs, delta * scale)


def layer_norm(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """y = w ∘ x̂ + b over the last dimensions."""
    assert isinstance(layer, nn.LayerNorm)
    x, shape = inputs[0], layer.normalized_shape
    # faster on a CPU than without them
    normal = F.layer_norm(x, shape, x.new_ones(shape), x.new_zeros(shape), layer.eps)
    return _scale_and_shift(layer, normal, delta, len(layer.normalized_shape))


def rms_norm(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """y = w ∘ x / rms(x)."""
    assert isinstance(layer, nn.RMSNorm)
    normal = F.rms_norm(inputs[0], list(layer.normalized_shape), eps=layer.eps)
    return _scale_and_shift(layer, normal, delta, len(layer.normalized_shape))


def scaled_norm(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """y = (c + w) ∘ x̂ with a normalised x̂ of any kind: ∂y/∂w = y(w = 1) − y(w = 0), by the layer's own forward."""
    return scaled(Scale("weight", None, -1), layer, inputs, delta)


def scaled(scale: Scale, layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """y = (c + w) ∘ x̂ + b, under whatever names."""
    like = getattr(layer, scale.weight)
    y_1, y_0 = (
        called_with(
            layer,
            {n: inputs[0].new_full(like.shape, x) for n, x in ((scale.weight, value), (scale.bias, 0.0)) if n},
            *inputs,
        )
        for value in (1.0, 0.0)
    )
    out = {scale.weight: _vector(_positions((delta * (y_1 - y_0)).movedim(scale.dim, -1)))}
    return out if scale.bias is None else {**out, scale.bias: _vector(_positions(delta.movedim(scale.dim, -1)))}


def group_norm(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """y = w_c x̂ + b_c with statistics over groups of channels of one sample."""
    assert isinstance(layer, nn.GroupNorm)
    normal = F.group_norm(inputs[0], layer.num_groups, eps=layer.eps)
    return _scale_and_shift(layer, normal.movedim(1, -1), delta.movedim(1, -1), 1)


def batch_norm(layer: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Contribution]:
    """y = w_c x̂ + b_c; in training mode x̂ has the statistics of the batch, and a row is ∂L/∂w⁽ᵇ⁾, with a copy w⁽ᵇ⁾ for each sample b."""
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    x, mean = inputs[0], layer.running_mean
    own = layer.training or mean is None
    normal = F.batch_norm(x, None if own else mean, None if own else layer.running_var, training=own, eps=layer.eps)
    return _scale_and_shift(layer, normal.movedim(1, -1), delta.movedim(1, -1), 1)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.modules.batchnorm._BatchNorm: batch_norm,
}

BY_NAME: dict[str, Rule] = {  # patterns of full class names, for packages that are never imported here
    "transformers.pytorch_utils.Conv1D": linear_transposed,
    "transformers.*RMSNorm": scaled_norm,
    "transformers.*ScaledWordEmbedding": scaled_embedding,
}


BUILT_IN = dict(RULES)


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of the nearest class in the module's ancestry that computes what the module does, or one by what it computes."""
    for kind in type(module).__mro__:
        rule = _rule_of(kind)
        if rule is None:
            continue
        if BUILT_IN.get(kind) is not rule or keeps_forward(module, kind) or computes_as(module, kind):
            return rule
        break
    scale = scale_of(module)
    return None if scale is None else partial(scaled, scale)


def covers(rule: Rule, name: str) -> bool:
    """Whether a rule gives the gradient of the parameter of this name; rules from outside are taken at their word."""
    return name in ("weight", "bias") or rule not in BUILT_IN.values()


def _rule_of(kind: type) -> Rule | None:
    if kind in RULES:
        return RULES[kind]
    name = f"{kind.__module__}.{kind.__qualname__}"
    return next((rule for pattern, rule in BY_NAME.items() if fnmatchcase(name, pattern)), None)


def _positions(a: Tensor) -> Tensor:
    return a.reshape(len(a), -1, a.shape[-1])


def _patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor, delta: Tensor) -> Patches:
    """A convolution in one dimension is one in two dimensions of height 1."""
    padding = tuple(layer._reversed_padding_repeated_twice)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if isinstance(layer, nn.Conv2d):
        return Patches(Window(layer.kernel_size, layer.stride, layer.dilation, padding, mode), delta, x)
    window = Window((1, *layer.kernel_size), (1, *layer.stride), (1, *layer.dilation), (*padding, 0, 0), mode)
    return Patches(window, delta.unsqueeze(2), x.unsqueeze(2))


def written_out(part: Contribution) -> Plain:
    """The same without patches."""
    return part.outer() if isinstance(part, Patches) else part


def count_positions(part: Contribution) -> int:
    """How many outer products a sample's gradient is the sum of; 2 for what is no such sum."""
    if isinstance(part, Patches):
        return part.left.shape[2:].numel()
    return part.right.shape[1] if isinstance(part, Outer) else 2


def _scale_and_shift(layer: nn.Module, normal: Tensor, delta: Tensor, n_features: int) -> Mapping[str, Contribution]:
    size = delta.shape[delta.dim() - n_features :].numel()
    delta = delta.reshape(len(delta), -1, size)  # (B, S, d)
    out: dict[str, Contribution] = {}
    if layer.weight is not None:
        out["weight"] = _vector(normal.reshape(delta.shape).mul_(delta))  # in place: `normal` is of no other use
    if getattr(layer, "bias", None) is not None:
        out["bias"] = _vector(delta)
    return out


@dataclass(frozen=True)
class Terms:
    """What is summed over samples and positions, before anything cancels; float64, as squares of small terms underflow."""

    size: Tensor  # Σ ‖term‖
    count: int
    vectors: Tensor  # ‖Σ terms‖ of a call, added over the calls; of vector parameters

    def __add__(self, other: "Terms") -> "Terms":
        """Those of one more call."""
        size, vectors = self.size.to(other.size) + other.size, self.vectors.to(other.vectors) + other.vectors
        return Terms(size, self.count + other.count, vectors)


def terms(part: Contribution) -> Terms:
    """The terms of one layer call. A `Dense` has its positions summed already: its rows are the terms."""
    part = written_out(part)
    if isinstance(part, Outer):
        sizes = _lengths(part.right) * (_lengths(part.left) if part.left.is_floating_point() else 1.0)  # (B, S)
        return Terms(sizes.sum(), sizes.numel(), sizes.new_zeros(()))
    rows = part.values if isinstance(part, Sum) else part.grads.flatten(1)
    sizes = _lengths(rows)
    return Terms(sizes.sum(), sizes.numel(), _lengths(rows.flatten(0, -2).sum(0, dtype=torch.float64)))


def _lengths(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return lengths


def _vector(values: Tensor) -> Contribution:
    """Σ_t values_t (B, S, d); with one position there is nothing to sum."""
    return Sum(values) if values.shape[1] > 1 else Dense(values[:, 0])
