r"""What a module computes, found by trying it on random numbers: its class's name does not tell.

Norms of many packages (T5LayerNorm, LlamaRMSNorm and their kin), layer scales and the like are one map,

    y = (c + w) ∘ x̂(x) + b        w, b: one number for each feature;  x̂ any function of a sample's own input

which shows in  y(w, 0) − y(0, 0) = w ∘ (y(1, 0) − y(0, 0))  and  y(w, b) − y(w, 0) = b.
"""

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

SAME = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative
SAME_HALF = 3e-2


class Scale(NamedTuple):
    """A module of that kind."""

    weight: str  # names of its parameters
    bias: str | None
    dim: int  # where the features are: the last dimension (-1), or the second (1)


def scale_of(module: nn.Module) -> Scale | None:
    """How the module scales and shifts features, if that is what it does with its parameters."""
    own = dict(module.named_parameters(recurse=False))
    sizes = {p.shape for p in own.values()}
    others = sum(1 for _ in module.parameters()) - len(own)
    if len(own) not in (1, 2) or others or len(sizes) != 1 or len(next(iter(sizes))) != 1:
        return None
    if any(p.is_meta or not p.is_floating_point() for p in own.values()):
        return None
    names = list(own)
    for weight, bias in [(names[0], None)] if len(names) == 1 else [(*names,), (*reversed(names),)]:
        for dim in (-1, 1):
            scale = Scale(weight, bias, dim)
            try:
                if _is(module, scale):
                    return scale
            except Exception:  # whatever a module has against such an input: it is something else
                continue
    return None


def called_with(module: nn.Module, parameters: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
    """What the module would put out with these parameters; its hooks, buffers and own parameters stay as they are."""
    twin = copy.copy(module)
    twin._parameters = {n: nn.Parameter(p, requires_grad=False) for n, p in parameters.items()}
    twin._buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    out: Tensor = type(module).forward(twin, *inputs)
    return out


def keeps_forward(module: nn.Module, kind: type) -> bool:
    """Whether a module's forward is that of its parent `kind`."""
    return getattr(type(module), "forward", None) is getattr(kind, "forward", None)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module with a forward of its own gives what that of its parent `kind` gives."""
    x = _example(module)
    if x is None or any(p.is_meta for p in module.parameters()):
        return False
    own = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
    try:
        with torch.no_grad():
            actual = called_with(module, own, x)
            expected = kind.forward(module, x)
        return _same(actual, expected)
    except Exception:  # it wants other inputs
        return False


def _is(module: nn.Module, scale: Scale) -> bool:
    like, generator = getattr(module, scale.weight), torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)

    d = len(like)
    x, shape = (normal(2, 3, d), (d,)) if scale.dim == -1 else (normal(2, d, 3, 4), (d, 1, 1))
    w, b, zero = normal(d), normal(d), like.new_zeros(d)

    def y(weight: Tensor, bias: Tensor, x: Tensor = x) -> Tensor:
        given = {scale.weight: weight} if scale.bias is None else {scale.weight: weight, scale.bias: bias}
        return called_with(module, given, x)

    with torch.no_grad():
        plain = y(torch.ones_like(w), zero) - y(zero, zero)
        if plain.shape != x.shape or not bool(plain.abs().amax() > 0):
            return False
        scales = _same(y(w, zero) - y(zero, zero), w.reshape(shape) * plain)
        shifts = scale.bias is None or _same(y(w, b) - y(w, zero), b.reshape(shape).expand_as(x))
        return scales and shifts and _same(y(w, b, x[:1]), y(w, b)[:1])


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and not bool((x - y).norm() > SAME.get(x.dtype, SAME_HALF) * y.norm())


def _example(module: nn.Module) -> Tensor | None:
    """An input of a layer of torch's."""
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...]
    if isinstance(module, nn.Embedding):
        return torch.randint(0, module.num_embeddings, (2, 3), generator=generator).to(module.weight.device)
    if isinstance(module, nn.Linear):
        shape = (2, 3, module.in_features)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        shape = (2, 3, *module.normalized_shape)
    elif isinstance(module, nn.Conv1d | nn.Conv2d):
        sides = zip(module.kernel_size, module.dilation, strict=True)
        shape = (2, module.in_channels, *((k - 1) * d + 4 for k, d in sides))
    elif isinstance(module, nn.GroupNorm):
        shape = (2, module.num_channels, 3)
    else:
        return None
    like = next(module.parameters(recurse=False), torch.zeros(()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)
