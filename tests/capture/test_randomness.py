"""States of the random generators, against what is drawn from them."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from backstory.capture.randomness import after, checksums, generators, own_randomness, pack, seed, unpack


def draws() -> tuple[Any, ...]:
    """Of every kind; normal numbers come in pairs, of which one waits."""
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_the_same_numbers_are_drawn_again(packed: bool, waiting: bool) -> None:
    with own_randomness():
        if waiting:
            random.gauss(0, 1)
            np.random.randn()
        before = unpack(pack(generators())) if packed else generators()
        expected = draws()
        assert draws() != expected
        seed(before)
        assert draws() == expected


def test_what_was_drawn_from_is_seen_and_the_rest_is_shared() -> None:
    with own_randomness():
        before = generators()
        for kind, draw in (("torch", lambda: torch.rand(1)), ("python", random.random), ("numpy", np.random.rand)):
            seed(before)
            draw()
            now = generators()
            changed = [
                k
                for k, a, b in zip(("torch", "python", "numpy"), checksums(before), checksums(now), strict=False)
                if a != b
            ]
            assert changed == [kind]
            assert {k for k, x in after(before, now).items() if x is not before[k]} == {kind}
        seed(before)
        assert after(before, generators()) is before


def test_generators_are_as_they_were_even_after_an_error() -> None:
    before = checksums(generators())
    with pytest.raises(ZeroDivisionError), own_randomness():
        draws()
        1 / 0  # noqa: B018
    assert checksums(generators()) == before
