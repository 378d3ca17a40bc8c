"""GPT-2's tokenizer on a small vocabulary, and against known tokens where the real one lies in the cache."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from backstory.demo.data import gpt2
from backstory.demo.data.fetch import DataError
from backstory.demo.data.gpt2 import BytePairs, byte_letters, merge, pattern

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("hell", "o"), ("Ã", "¤")]


def vocabulary() -> dict[str, int]:
    letters = byte_letters()
    return {text: k for k, text in enumerate([*letters, *(a + b for a, b in MERGES)])}


def test_pieces_of_a_text() -> None:
    found = pattern().findall("I'll  pay 12½€ to Zoë's\u00a0 _x\n\n now \t")
    assert found == [
        "I",
        "'ll",
        " ",
        " pay",
        " 12½",
        "€",
        " to",
        " Zoë",
        "'s",
        "\u00a0",
        " _",
        "x",
        "\n\n",
        " now",
        " \t",
    ]
    assert "".join(found) == "I'll  pay 12½€ to Zoë's\u00a0 _x\n\n now \t"


def test_every_byte_has_a_letter() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert (letters[ord("A")], letters[ord(" ")], letters[ord("\n")], letters[0xC3]) == ("A", "Ġ", "Ċ", "Ã")
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)


def test_merges_go_by_rank_not_by_place() -> None:
    rank = {("b", "c"): 0, ("a", "b"): 1, ("a", "bc"): 2}
    assert merge(list("abc"), rank) == ["abc"]
    assert merge(list("ab"), rank) == ["ab"]
    assert merge(list("aaa"), {("a", "a"): 0}) == ["aa", "a"]
    assert merge(["a"], rank) == ["a"]


def test_a_small_vocabulary_round_trips() -> None:
    tokenizer = BytePairs(vocabulary(), MERGES)
    known = vocabulary()
    tokens = tokenizer.encode("hello worldä")
    assert tokens == [known[x] for x in ("hello", "Ġw", "o", "r", "l", "d", "Ã¤")]
    assert tokenizer.decode(tokens) == "hello worldä"
    text = "Äny 🙂 text:\t'quoted'\n\n  12\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([known["Ã"]]) == "\ufffd"
    assert tokenizer.size == 262


def write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES), ""]
    files = {"encoder.json": json.dumps(vocabulary()).encode(), "vocab.bpe": "\n".join(lines).encode()}
    monkeypatch.setattr(gpt2, "GPT2", {n: hashlib.sha256(d).hexdigest() for n, d in files.items()})
    for name, data in files.items():
        (folder / name).write_bytes(data)


def test_your_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, monkeypatch)
    tokenizer = gpt2.gpt2_tokenizer(tmp_path)
    assert tokenizer.encode("hello") == [vocabulary()["hello"]]
    assert tokenizer.decode(tokenizer.encode("hello wä")) == "hello wä"
    (tmp_path / "vocab.bpe").write_bytes(b"")
    with pytest.raises(DataError, match="is not the expected file"):
        gpt2.gpt2_tokenizer(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="the package tokenizers is not installed")
def test_the_fast_code_gives_the_same_tokens() -> None:
    plain, fast = BytePairs(vocabulary(), MERGES), gpt2.FastBytePairs(vocabulary(), MERGES)
    for text in ("hello world", "Äny 🙂 text:\t'quoted'\n\n  12½ \u00a0\x1c x", "", "  hellohell"):
        assert plain.encode(text) == fast.encode(text)
        assert fast.decode(fast.encode(text)) == text
