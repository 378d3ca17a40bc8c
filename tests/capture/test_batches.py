"""A step's data is recognised by a checksum."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backstory.capture.batches import BatchDigest

X = torch.arange(12.0).reshape(4, 3)
MASK = torch.tensor([[True], [False], [True], [True]])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def called(x: Tensor, mask: Tensor | None, model: Masked) -> object:
    return model(x, mask)


def digest(calls: Callable[[Masked], object]) -> int | None:
    model = Masked()
    seen = BatchDigest(model)
    seen.attach()
    model(X)  # in no step
    seen.begin()
    calls(model)
    value = seen.end()
    seen.detach()
    assert not model._forward_pre_hooks
    return value


def test_micro_batches_are_the_whole_batch_and_names_do_not_count() -> None:
    whole = digest(lambda m: m(X, MASK))
    assert whole is not None
    assert digest(lambda m: [m(X[:3], MASK[:3]), m(X[3:], MASK[3:])]) == whole
    assert digest(lambda m: m(mask=MASK, x=X)) == whole
    assert digest(lambda m: m(X, {"mask": [MASK]})) == whole
    assert digest(lambda m: m(X[:, [0, 1, 2]].T.contiguous().T, MASK)) == whole, "strides do not count"


def test_other_data_and_another_order_are_seen() -> None:
    whole = digest(lambda m: m(X, MASK))
    pairs = [(X.flip(0), MASK), (X + 1, MASK), (X, ~MASK), (X, None)]
    others = [digest(partial(called, x, y)) for x, y in pairs]
    assert len({whole, *others}) == 5


def test_only_calls_of_the_whole_model_that_are_differentiated_count() -> None:
    assert digest(lambda m: m.inner(X)) is None
    assert digest(lambda m: torch.no_grad()(m)(X)) is None
    assert digest(lambda m: copy.deepcopy(m)(X)) is None
