"""By what a loss was divided: small numbers, worked out by hand."""

import pytest

from backstory.errors import UnsupportedError
from backstory.integrations.weighing import Part, fitting, weight


def test_the_divisor_is_found_by_the_loss() -> None:
    assert fitting(2.0, 18.0, [9, 3]) == [9]
    assert fitting(6.0, 18.0, [9, 3]) == [3]
    assert fitting(2.01, 18.0, [9, 3]) == [9], "half precision is coarse"
    assert fitting(0.0, 0.0, [9]) == [9], "a text without a loss"
    assert fitting(2.0, 18.0, []) == []
    with pytest.raises(UnsupportedError, match=r"loss is 3, but .* divided by \[9, 3\], make \[2.0, 6.0\]"):
        fitting(3.0, 18.0, [9, 3])


def test_a_third_is_taken_for_exact() -> None:
    third = 0.3333333432674408  # in float32
    assert weight(third, 4) == 1 / 12
    assert weight(1.0, 7) == 1 / 7
    assert weight(2.0, 8) == 0.25
    assert weight(0.4, 2) == 0.2


def test_the_trainers_divisor_comes_first_and_nothing_is_no_divisor() -> None:
    assert Part(9, 3).divisors() == [9, 3]
    assert Part(None, 3).divisors() == [3]
    assert Part(9, 0).divisors() == [9]
    assert Part(None, None).divisors() == []
