"""Plain values, as a study or an answer gives them to JSON, from two computations."""

import re
from typing import Any

import pytest

NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def assert_alike(actual: Any, expected: Any, *, rel: float = 1e-9, abs: float = 1e-12) -> None:
    """The same keys, words and whole numbers; numbers with a fraction up to rounding, in float64 unless told otherwise.

    Of three digits in a text, the last may be one more or less.
    """
    assert type(actual) is type(expected), f"found {actual!r}, expected {expected!r}"
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_alike(actual[key], expected[key], rel=rel, abs=abs)
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_alike(a, b, rel=rel, abs=abs)
    elif isinstance(actual, float):
        assert actual == pytest.approx(expected, rel=rel, abs=abs, nan_ok=True)
    elif isinstance(actual, str):
        assert NUMBER.split(actual) == NUMBER.split(expected)
        shown, told = ([float(x) for x in NUMBER.findall(text)] for text in (actual, expected))
        assert shown == pytest.approx(told, rel=max(rel, 0.01))
    else:
        assert actual == expected
