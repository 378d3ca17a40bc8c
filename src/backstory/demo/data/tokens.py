"""Text as numbers: bytes or frequent pieces of words, and sequences of one length with stable ids.

A sequence's id is source/document/offset, the offset counted in tokens from the document's start. Documents are never
joined: what is left over at a document's end, shorter than a sequence, is dropped.

Shapes:  N sequences of `length` tokens.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import UnsupportedError, UsageError


class Document(NamedTuple):
    """One text, and where it comes from; its id is unique within its source."""

    id: str
    source: str
    text: str


class Encoder(Protocol):
    """What turns a text into tokens."""

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""


class Tokenizer(Encoder, Protocol):
    """What turns them back, too."""

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each token."""


@dataclass(frozen=True)
class Bytes:
    """One token for each byte of UTF-8."""

    size: int = 256

    def encode(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode())

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """Each token is a byte."""
        return [bytes([token]) for token in tokens]


@dataclass(frozen=True)
class Pieces:
    """Frequent pieces of words, and all bytes, so that any text has tokens: byte-level BPE by the package `tokenizers`."""

    as_json: str

    @staticmethod
    def learn(texts: Iterable[str], size: int) -> "Pieces":
        """The `size` tokens that shorten these texts most."""
        learner = _tokenizers().ByteLevelBPETokenizer()
        learner.train_from_iterator(texts, vocab_size=size, min_frequency=2, show_progress=False)
        return Pieces(learner.to_str())

    @cached_property
    def _inner(self) -> Any:
        return _tokenizers().Tokenizer.from_str(self.as_json)

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self._inner.get_vocab_size())

    @cached_property
    def _spelling(self) -> dict[int, bytes]:
        letters = _byte_letters()
        return {k: bytes(letters[c] for c in piece) for piece, k in self._inner.get_vocab().items()}

    def encode(self, text: str) -> list[int]:
        """The text's pieces."""
        return [int(k) for k in self._inner.encode(text).ids]

    def spell(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of each piece."""
        return [self._spelling[token] for token in tokens]


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise UnsupportedError(
            "the text demo needs the package 'tokenizers': pip install '.[demo]' in the checkout."
        ) from error


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: itself where it can be seen, else the next one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [k for k in range(256) if k not in set(seen)]
    return {chr(k): k for k in seen} | {chr(256 + n): k for n, k in enumerate(unseen)}


def decode(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of tokens; a cut character becomes U+FFFD."""
    return b"".join(tokenizer.spell(tokens)).decode(errors="replace")


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length, ready for training."""

    ids: list[str]  # source/document/offset
    sources: list[str]
    tokens: Tensor  # (N, length) int64


def cut(documents: Iterable[Document], tokenizer: Encoder, length: int) -> Sequences:
    """Every document, cut into sequences of `length` tokens."""
    if length < 1:
        raise UsageError(f"length must be at least 1 token, got {length}.")
    ids, sources, rows, known = list[str](), list[str](), list[list[int]](), set[tuple[str, str]]()
    for document in documents:
        if (document.source, document.id) in known:
            raise UsageError(f"two documents have the id {document.source}/{document.id}. Give each its own id.")
        known.add((document.source, document.id))
        tokens = tokenizer.encode(document.text)
        for offset in range(0, len(tokens) - length + 1, length):
            ids.append(f"{document.source}/{document.id}/{offset}")
            sources.append(document.source)
            rows.append(tokens[offset : offset + length])
    if not rows:
        raise UsageError(f"none of the {len(known)} documents has {length} tokens. Use a smaller length.")
    return Sequences(ids, sources, torch.tensor(rows, dtype=torch.int64))
