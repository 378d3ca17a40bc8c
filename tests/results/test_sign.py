"""The sign in words, in one place."""

from pathlib import Path

import pytest

import backstory
from backstory.results.sign import SIGN, describe_sign, verb


@pytest.mark.parametrize(("x", "words"), [(0.5, "helped: without it the loss would be higher"), (-0.5, "hurt: without it the loss would be lower"), (0.0, "had no influence")])  # fmt: skip
def test_the_sign_is_in_words(x: float, words: str) -> None:
    assert describe_sign(x) == words
    assert words.startswith(verb(x))


def test_the_sentence_stands_once() -> None:
    source = Path(backstory.__file__).parent
    files = [p for p in source.rglob("*.py") if SIGN[:28] in p.read_text()]
    assert [p.name for p in files] == ["sign.py"]
