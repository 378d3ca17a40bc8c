"""Plain values, as a study or an answer gives them to JSON, from two computations."""

import re
from typing import Any

import pytest

NUMBER = re.compile(r"\d+\.\d+(?:e-?\d+)?")


def assert_alike(found: Any, expected: Any, *, rel: float = 1e-9, abs: float = 1e-12) -> None:
    """The same keys, words and whole numbers; numbers with a fraction up to rounding, in float64 unless told otherwise.

    Of three digits in a text, the last may be one more or less.
    """
    assert type(found) is type(expected), f"found {found!r}, expected {expected!r}"
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_alike(found[key], expected[key], rel=rel, abs=abs)
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_alike(a, b, rel=rel, abs=abs)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=rel, abs=abs, nan_ok=True)
    elif isinstance(found, str):
        assert NUMBER.split(found) == NUMBER.split(expected)
        shown, told = ([float(x) for x in NUMBER.findall(text)] for text in (found, expected))
        assert shown == pytest.approx(told, rel=max(rel, 0.01))
    else:
        assert found == expected
