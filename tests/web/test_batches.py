"""Batches of every kind have a size, and parts that together are the whole."""

from typing import Any

import pytest
import torch

from backstory.web.batches import part, parts, size

X, Y = torch.arange(20).reshape(10, 2), torch.arange(10)


@pytest.mark.parametrize("batch", [X, (X, Y), {"x": X, "y": Y}])
def test_parts_are_the_whole(batch: Any) -> None:
    def first(b: Any) -> torch.Tensor:
        found: torch.Tensor = b if isinstance(b, torch.Tensor) else b["x"] if isinstance(b, dict) else b[0]
        return found

    assert size(batch) == 10
    found = list(parts(batch, 4))
    assert [size(b) for b in found] == [4, 4, 2]
    assert torch.equal(torch.cat([first(b) for b in found]), X)
    assert size(part(batch, 0, 3)) == 3


def test_a_small_batch_stays_as_it_is() -> None:
    assert list(parts(X, 10)) == [X]
