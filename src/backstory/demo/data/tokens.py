"""Text as numbers: bytes, and sequences of one length with stable ids.

A sequence's id is source/document/offset, the offset counted in tokens from the document's start. Documents are never
joined: what is left over at a document's end, shorter than a sequence, is dropped.

Shapes:  N sequences of `length` tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import UsageError


class Document(NamedTuple):
    """One text, and where it comes from; its id is unique within its source."""

    id: str
    source: str
    text: str


class Tokenizer(Protocol):
    """What turns a text into tokens."""

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""


@dataclass(frozen=True)
class Bytes:
    """One token for each byte of UTF-8."""

    size: int = 256

    def encode(self, text: str) -> list[int]:
        """The text's bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes; a cut character becomes U+FFFD."""
        return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length, ready for training."""

    ids: list[str]  # source/document/offset
    sources: list[str]
    tokens: Tensor  # (N, length) int64


def cut(documents: Iterable[Document], tokenizer: Tokenizer, length: int) -> Sequences:
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
