"""Typed text becomes tokens, tokens become readable text."""

import pytest
import torch

from backstory.demo.data import Bytes, Pieces
from backstory.demo.data.typed import encode_text, pieces, show_queries, text_of
from backstory.errors import UsageError

LEARNED = Pieces.learn(["the court and the court and the law, déjà vu "] * 20, 300)


@pytest.mark.parametrize("n", [2, 12, 13, 14, 25, 26, 100])
def test_typed_text_is_cut_into_rows_that_hold_every_token(n: int) -> None:
    text = "".join(chr(97 + k % 26) for k in range(n))
    actual = encode_text(text, Bytes(), length=12)
    assert actual.shape[1] <= 13
    assert len(actual) == -(-(n - 1) // 12)
    rows = [bytes(row).decode() for row in actual.tolist()]
    assert all(row in text for row in rows)
    starts = [text.index(row) if n <= 26 else None for row in rows]
    if n <= 26:
        covered = {
            k
            for start, row in zip(starts, rows, strict=True)
            if start is not None
            for k in range(start, start + len(row))
        }
        assert covered == set(range(n))
    assert rows[0] == text[: len(rows[0])]
    assert rows[-1] == text[-len(rows[-1]) :]


def test_a_text_of_one_token_is_refused() -> None:
    for text in ("", "a"):
        with pytest.raises(UsageError, match="must have 2 or more tokens"):
            encode_text(text, Bytes(), length=12)
    with pytest.raises(UsageError, match="got 1"):
        encode_text(" court", LEARNED, length=12)


def test_pieces_are_the_letters_at_their_last_token() -> None:
    tokens = torch.tensor([list("aé€b!".encode())])
    assert pieces(tokens, 0, Bytes()) == ["a", "", "é", "", "", "€", "b"]
    assert "".join(pieces(torch.tensor([list(b"\xff\xff\xff\xffab")]), 0, Bytes())).endswith("a")


def test_pieces_of_words_add_up_to_the_text() -> None:
    tokens = encode_text("the court, déjà € vu!", LEARNED, length=64)
    parts = pieces(tokens, 0, LEARNED)
    assert " court" in parts
    assert len(parts) == tokens.shape[1] - 1
    assert "".join(parts) == "the court, déjà € vu"


def test_queries_are_shown_as_text() -> None:
    assert show_queries(torch.tensor([list(b"ab"), list(b"cd")]), Bytes()) == [{"text": "ab"}, {"text": "cd"}]
    assert text_of(torch.tensor([0xC3]), Bytes()) == "\ufffd"
