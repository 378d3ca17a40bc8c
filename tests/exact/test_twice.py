"""Attention and cross-entropy written out, against torch's own: values, first and second derivatives."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.oracles import assert_close
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from backstory.exact import twice
from backstory.exact.twice import twice_differentiable

D = torch.float64
CASES: dict[
    str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]
] = {  # arguments, shapes of queries and of keys
    "causal": ({"is_causal": True}, (2, 3, 5, 4), (2, 3, 5, 4)),
    "causal, more keys": ({"is_causal": True}, (2, 3, 4), (2, 5, 4)),
    "causal, fewer keys": ({"is_causal": True}, (2, 7, 4), (2, 3, 4)),
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


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("name", CASES)
def test_equals_torchs_own(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twice, "ROWS", rows)
    arguments, queries, keys = CASES[name]
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=g, dtype=D).requires_grad_() for s in (queries, keys, keys)]
    along = [torch.randn(x.shape, generator=g, dtype=D) for x in inputs]
    with twice_differentiable():
        actual = derivatives(inputs, arguments, along)
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(inputs, arguments, along)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.detach(), e.detach(), rtol=1e-12)


def test_dropout_is_torchs_own() -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=D)
    drawn = []
    for context in (twice_differentiable(), sdpa_kernel(SDPBackend.MATH)):
        with context, torch.random.fork_rng():
            torch.manual_seed(1)
            drawn.append(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert_close(drawn[0], drawn[1], rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_which_are_written_out(name: str) -> None:
    arguments, queries, keys = CASES[name]
    written = twice._attention(torch.ones(queries), torch.ones(keys), torch.ones(keys), **arguments)
    assert (written is None) == (name in ("mask", "grouped heads", "one matrix"))


def entropies(z: Tensor, y: Tensor, w: Tensor, along: Tensor, **arguments: Any) -> list[Tensor]:
    """The losses, the gradient of their weighted sum, and its derivatives along a direction by logits and weights."""
    losses = F.cross_entropy(z, y, reduction="none", **arguments)
    (grad,) = torch.autograd.grad((losses.square() * w).sum(), z, create_graph=True)
    return [losses, grad, *torch.autograd.grad(grad, (z, w), along)]


@pytest.mark.parametrize("arguments", [{}, {"ignore_index": 2}, {"ignore_index": -1}])
def test_cross_entropy_equals_torchs_own(arguments: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(0)
    z, along = (torch.randn(6, 5, generator=g, dtype=D) for _ in range(2))
    y = torch.tensor([0, 4, 2, arguments.get("ignore_index", -100), 3, 2])
    w = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2, 0.5], dtype=D, requires_grad=True)
    expected = entropies(z.requires_grad_(), y, w, along, **arguments)
    with twice_differentiable():
        actual = entropies(z, y, w, along, **arguments)
    assert "_CrossEntropy" in str(next_of(actual[0]))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.detach(), e.detach(), rtol=1e-12)


def next_of(x: Tensor) -> Any:
    """What led to the selection of the rows that count."""
    assert x.grad_fn is not None
    return x.grad_fn.next_functions[0][0]


CLASSES: list[dict[str, Any]] = [
    {"weight": torch.tensor([1.0, 2.0, 3.0])},
    {"label_smoothing": 0.1},
    {"reduction": "mean"},
    {"target": torch.full((4, 3), 1 / 3)},
    {"input": torch.zeros(2, 3, 4), "target": torch.zeros(2, 4, dtype=torch.long)},
]


@pytest.mark.parametrize("changed", CLASSES, ids=lambda c: ", ".join(c))
def test_other_cross_entropies_are_torchs_own(changed: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        "input": torch.zeros(4, 3),
        "target": torch.zeros(4, dtype=torch.long),
        "reduction": "none",
    }
    assert twice._cross_entropy(**plain) is not None
    assert twice._cross_entropy(**{**plain, **changed}) is None


def test_wrong_classes_are_refused_as_by_torch() -> None:
    with twice_differentiable(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        F.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 3]), reduction="none")
