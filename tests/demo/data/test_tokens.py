"""Bytes, pieces of words, and sequences with stable ids."""

import pytest
import torch

from backstory.demo.data.tokens import Bytes, Document, Pieces, cut, decode
from backstory.errors import UsageError

DOCUMENTS = [Document("a", "x", "abcdefg"), Document("b", "x", "hi"), Document("a", "y", "ä12")]


def test_bytes_round_trip() -> None:
    for text in ("", "plain", "Ä → 🙂\n"):
        assert decode(Bytes().encode(text), Bytes()) == text
    assert Bytes().encode("ä") == [0xC3, 0xA4]
    assert decode([0xC3], Bytes()) == "\ufffd"


def test_pieces_are_frequent_words_and_spell_any_text() -> None:
    learned = Pieces.learn(["the court of the law "] * 9, 280)
    again = Pieces(learned.as_json)
    assert again.size == learned.size <= 280
    assert [b" court"] == again.spell(again.encode(" court"))
    for text in ("", "the court", "Ä → 🙂\n\t", "".join(map(chr, range(1, 300)))):
        assert decode(again.encode(text), again) == text


def test_documents_are_cut_and_tails_dropped() -> None:
    actual = cut(DOCUMENTS, Bytes(), 3)
    assert actual.ids == ["x/a/0", "x/a/3", "y/a/0"]
    assert actual.sources == ["x", "x", "y"]
    assert actual.tokens.dtype == torch.int64
    assert actual.tokens.tolist() == [[97, 98, 99], [100, 101, 102], [0xC3, 0xA4, 49]]


def test_ids_do_not_depend_on_the_other_documents() -> None:
    alone, all_of_them = cut(DOCUMENTS[:1], Bytes(), 2), cut(DOCUMENTS[::-1], Bytes(), 2)
    rows = dict(zip(all_of_them.ids, all_of_them.tokens.tolist(), strict=True))
    assert all(rows[i] == row for i, row in zip(alone.ids, alone.tokens.tolist(), strict=True))


def test_a_document_of_exactly_one_length_is_kept() -> None:
    assert cut(DOCUMENTS[1:2], Bytes(), 2).ids == ["x/b/0"]


def test_what_gives_no_sequences_is_told() -> None:
    with pytest.raises(UsageError, match="none of the 3 documents has 8 tokens"):
        cut(DOCUMENTS, Bytes(), 8)
    with pytest.raises(UsageError, match="length must be at least 1 token, got 0"):
        cut(DOCUMENTS, Bytes(), 0)
    with pytest.raises(UsageError, match="two documents have the id x/a"):
        cut([*DOCUMENTS, DOCUMENTS[0]], Bytes(), 2)
