"""Attention written out, against torch's own unfused form: values, first and second derivatives."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.oracles import assert_close
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from backstory.exact import attention
from backstory.exact.attention import differentiable_attention

D = torch.float64
CASES: dict[
    str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]
] = {  # arguments, shapes of queries and of keys
    "causal": ({"is_causal": True}, (2, 3, 5, 4), (2, 3, 5, 4)),
    "causal, more keys": ({"is_causal": True}, (2, 3, 4), (2, 5, 4)),
    "plain": ({}, (2, 3, 4), (2, 5, 4)),
    "scale": ({"is_causal": True, "scale": 0.3}, (2, 1, 5, 4), (2, 1, 5, 4)),
    "mask": ({"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(1)}, (2, 3, 5, 4), (2, 3, 5, 4)),
    "grouped heads": ({"enable_gqa": True}, (2, 4, 5, 4), (2, 2, 5, 4)),
    "one matrix": ({}, (5, 4), (5, 4)),
}


def derivatives(inputs: list[Tensor], arguments: dict[str, Any], along: list[Tensor]) -> list[Tensor]:
    """The values, their gradients, and the derivative of ⟨gradient, along⟩."""
    query, key, value = inputs
    out = F.scaled_dot_product_attention(query, key, value, **arguments)
    grads = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
    return [out, *grads, *torch.autograd.grad(grads, inputs, along)]


@pytest.mark.parametrize("name", CASES)
def test_equals_torchs_own(name: str) -> None:
    arguments, queries, keys = CASES[name]
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=g, dtype=D).requires_grad_() for s in (queries, keys, keys)]
    along = [torch.randn(x.shape, generator=g, dtype=D) for x in inputs]
    with differentiable_attention():
        actual = derivatives(inputs, arguments, along)
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(inputs, arguments, along)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.detach(), e.detach(), rtol=1e-12)


def test_dropout_is_torchs_own() -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    drawn = []
    for context in (differentiable_attention(), sdpa_kernel(SDPBackend.MATH)):
        with context, torch.random.fork_rng():
            torch.manual_seed(1)
            drawn.append(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert_close(drawn[0], drawn[1], rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_which_are_written_out(name: str) -> None:
    arguments, queries, keys = CASES[name]
    written = attention._attention(torch.ones(queries), torch.ones(keys), torch.ones(keys), **arguments)
    assert (written is None) == (name in ("mask", "grouped heads", "one matrix"))
