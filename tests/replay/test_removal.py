"""Which occurrences a removal names."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from backstory.errors import UsageError
from backstory.replay.removal import Removal, index, places

IDS = [["a", "b"], ["c", "a"], ["b", "c"]]


def test_places_are_the_hits_of_each_step() -> None:
    for removal in (Removal(("a",)), Removal(("b", "c")), Removal(("c",), steps=(2, 0)), Removal(("a", "a"))):
        found = places(removal, index(IDS))
        assert found == {t: hits for t, ids in enumerate(IDS) if (hits := removal.hits(t, ids))}
        assert list(found) == sorted(found)


def test_ids_out_of_tensors_and_arrays_are_the_numbers_they_are() -> None:
    batches: Any = [torch.tensor([4, 7]), np.array([9, 4])]
    names: list[Any] = [4, torch.tensor(4), np.int64(4)]
    for removal in (Removal((name,)) for name in names):
        assert places(removal, index(batches)) == {0: [0], 1: [1]}
        assert removal.hits(1, batches[1]) == [1]


def test_nothing_to_remove_is_an_error() -> None:
    for removal in (Removal(("d",)), Removal(("a",), steps=(2,))):
        with pytest.raises(UsageError, match="nothing to remove"):
            places(removal, index(IDS))


@pytest.mark.parametrize("share", [0.0, math.nan, math.inf])
def test_a_share_that_means_nothing_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        Removal(("a",), share=share)
