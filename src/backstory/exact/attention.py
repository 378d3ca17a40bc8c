r"""Attention that can be differentiated twice: softmax(q kᵀ / √d + mask) v, written out.

torch's fused attentions have no second derivative, and its own unfused form takes several passes over (L, S) that a plain or causal
attention does not need. Whatever else is wanted of it (masks, dropout, grouped heads) is left to torch's unfused form.

Shapes:  L queries, S keys, d numbers of each; batch and heads in front.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """What runs inside may be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH), _WrittenOut():
        yield


class _WrittenOut(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mixed = _attention(*args, **kwargs) if func is F.scaled_dot_product_attention else None
        return func(*args, **kwargs) if mixed is None else mixed


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
    mask = query.new_zeros(query.shape[-2], key.shape[-2])
    if is_causal:
        mask = mask.fill_(-torch.inf).triu_(1)
    q, k, v = (x.flatten(0, -3) for x in (query, key, value))
    alpha = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=alpha).softmax(-1)  # (…, L, S)
    mixed: Tensor = (weights @ v).unflatten(0, lead)
    return mixed
