r"""Attention and cross-entropy, written so that they can be differentiated twice, in few passes over memory.

torch's fused attentions have no second derivative, and its own unfused form, like its cross-entropy, takes several passes more than
a plain case needs. With the gradient g that comes back, p = softmax(z), and c along which that is differentiated,

    attention        softmax(q kᵀ / √d + mask) v        where causal, keys that none of a block of queries may see are left out
    cross-entropy    log Σ exp z − z_y        its gradient: g (p − e_y)        of that: g p ∘ (c − ⟨p, c⟩) by z, ⟨p, c⟩ − c_y by g

Whatever else is wanted of them (masks, dropout, grouped heads; class weights, means, smoothed labels) is left to torch.

Shapes:  attention: L queries, S keys, d numbers of each; batch and heads in front. Cross-entropy: N rows, C classes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

ROWS = 64  # queries of a causal attention that are taken at once


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """What runs inside may be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH), _WrittenOut():
        yield


class _WrittenOut(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = OWN.get(func)
        value = None if own is None else own(*args, **kwargs)
        return func(*args, **kwargs) if value is None else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """(…, L, d), (…, S, d), (…, S, e) -> (…, L, e); None where it is left to torch. The arguments are torch's."""
    lead = query.shape[:-2]
    if attn_mask is not None or dropout_p or enable_gqa or not lead or not lead == key.shape[:-2] == value.shape[:-2]:
        return None
    alpha = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = (x.flatten(0, -3) for x in (query, key, value))
    mixed = _causal(q, k, v, alpha) if is_causal else _mixed(q, k, v, q.new_zeros(()), alpha)
    out: Tensor = mixed.unflatten(0, lead)
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor, alpha: float) -> Tensor:
    """Some queries at a time, with the keys up to the last of them."""
    out = []
    for first in range(0, q.shape[1], ROWS):
        rows = q[:, first : first + ROWS]
        end = min(first + ROWS, k.shape[1])
        mask = q.new_full((rows.shape[1], end), -torch.inf).triu_(1 + first)
        out.append(_mixed(rows, k[:, :end], v[:, :end], mask, alpha))
    return torch.cat(out, 1) if len(out) > 1 else out[0]


def _mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, alpha: float) -> Tensor:
    return torch.baddbmm(mask, q, k.transpose(1, 2), alpha=alpha).softmax(-1) @ v


def _cross_entropy(
    input: Tensor, target: Tensor, *others: Any, ignore_index: int = -100, reduction: str = "mean", **more: Any
) -> Tensor | None:
    """(N, C), (N,) -> (N,); None where it is left to torch. The arguments are torch's."""
    plain = input.dim() == 2 and target.dim() == 1 and input.is_floating_point() and not target.is_floating_point()
    wanted = more.get("weight") is not None or more.get("label_smoothing", 0.0)
    if others or wanted or reduction != "none" or not plain or len(input) != len(target):
        return None
    counted = target != ignore_index
    each: Callable[..., Tensor] = _CrossEntropy.apply
    return torch.where(counted, each(input, torch.where(counted, target, 0)[:, None]), 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor) -> Tensor:
        logs = F.log_softmax(z, -1)
        loss = -logs.gather(1, y)[:, 0]
        ctx.save_for_backward(z, logs.exp_(), y)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        gradient: Callable[..., Tensor] = _CrossEntropyGradient.apply
        return gradient(*ctx.saved_tensors, g[:, None]), None


class _CrossEntropyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Tensor, y: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(p, y, g)
        return (p * g).scatter_add_(1, y, -g)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor) -> Any:
        p, y, g = ctx.saved_tensors
        turned = p * c
        mean = turned.sum(1, keepdim=True)
        return turned.addcmul_(p, mean, value=-1).mul_(g), None, None, mean - c.gather(1, y)


OWN: dict[Any, Callable[..., Tensor | None]] = {
    F.scaled_dot_product_attention: _attention,
    F.cross_entropy: _cross_entropy,
}
