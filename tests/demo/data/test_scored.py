"""Scored merges against the loop of llama2.c, written out."""

import random
import struct
from itertools import pairwise

import pytest

from backstory.demo.data.fetch import DataError
from backstory.demo.data.scored import FIRST_PIECE, ScoredTokens, read_scored

SCORED = [
    (" ", -1.0), ("a", -2.0), ("b", -3.0), ("c", -3.0), ("ab", 5.0), ("bc", 6.0), ("abc", 1.0), (" a", 6.0), ("aa", 4.0),
    (" ab", 3.0), ("aab", 2.0), (" abc", 2.5), ("\na", 9.0),
]  # fmt: skip


def file() -> bytes:
    """Three special tokens, 256 bytes (stored as llama2.c stores them: as characters), then the pieces."""
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0), *((chr(k).encode(), 0.0) for k in range(256))]
    pieces += [(text.encode(), score) for text, score in SCORED]
    return struct.pack("<i", 9) + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in pieces)


def tokenizer() -> ScoredTokens:
    return read_scored(file(), 259 + len(SCORED))


def loop(text: str) -> list[str]:
    """The best pair of the whole text, the leftmost of equals, over and over."""
    scores, parts = dict(SCORED), list(f" {text}")
    while True:
        pairs = [(scores.get(a + b, -1e10), -k) for k, (a, b) in enumerate(pairwise(parts))]
        if not pairs or max(pairs)[0] == -1e10:
            return parts
        k = -max(pairs)[1]
        parts[k : k + 2] = [parts[k] + parts[k + 1]]


def test_merges_are_those_of_the_loop() -> None:
    draw, made = random.Random(0), tokenizer()
    for _ in range(300):
        text = "".join(draw.choices("abc ", k=draw.randrange(1, 14)))
        found = [made.pieces[token].decode() for token in made.encode(text)]
        assert found == loop(text), text


def test_texts_round_trip_also_through_bytes() -> None:
    made = tokenizer()
    for text in ("", "abc", " two", "äx🙂\n", "ÿÃ", "\x00a"):
        assert made.decode(made.encode(text)) == text
    assert made.encode("") == []
    assert made.encode("\n") == [FIRST_PIECE, 3 + 10]
    assert made.encode("\na") == [FIRST_PIECE, 3 + 10, FIRST_PIECE + 1]  # a lone byte does not merge
    assert made.encode("ä") == [FIRST_PIECE, 3 + 0xC3, 3 + 0xA4]  # not token 3 + 0xE4, which looks like "ä"
    assert made.decode([1, *made.encode("ab"), 2]) == "ab"


def test_a_file_of_another_size_is_refused() -> None:
    with pytest.raises(DataError, match="ends at token"):
        read_scored(file(), 259 + len(SCORED) + 1)
    with pytest.raises(DataError, match="bytes; 258 tokens take"):
        read_scored(file(), 258)
