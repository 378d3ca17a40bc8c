"""Llama's tokenizer as llama2.c stores and runs it: of all neighbours, the pair whose piece has the best score merges first.

The file: the longest piece (int32), then for each token its score (float32), its length (int32) and its bytes.
Tokens 0 … 2 are unknown, begin and end; 3 … 258 are the 256 bytes; the others are pieces of text. A text is encoded with a
space before it, which decoding takes away.
"""

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .fetch import DataError

BEGIN, END = 1, 2
FIRST_BYTE, FIRST_PIECE = 3, 259


@dataclass(frozen=True)
class ScoredTokens:
    """Pieces of text with scores."""

    pieces: list[bytes]
    scores: list[float]
    numbers: dict[bytes, int]  # of pieces

    @property
    def size(self) -> int:
        """How many different tokens there are."""
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without begin and end."""
        if not text:
            return []
        tokens = [token for letter in f" {text}" for token in self._letter(letter)]
        return self._merge(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; begin, end and unknown are left out."""
        data = b"".join(self._bytes(token) for token in tokens if token >= FIRST_BYTE)
        return data.removeprefix(b" ").decode(errors="replace")

    def _letter(self, letter: str) -> list[int]:
        data = letter.encode()
        return [self.numbers[data]] if data in self.numbers else [byte + FIRST_BYTE for byte in data]

    def _bytes(self, token: int) -> bytes:
        return bytes([token - FIRST_BYTE]) if token < FIRST_PIECE else self.pieces[token]

    def _merge(self, tokens: list[int]) -> list[int]:
        """Merge the best pair, the leftmost of equals, until none is known; `after` and `before` link what is left."""
        count = len(tokens)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        heap: list[tuple[float, int, int, int, int]] = []  # minus score, place, the pair, its token

        def offer(left: int) -> None:
            if left >= 0 and after[left] < count:
                a, b = tokens[left], tokens[after[left]]
                known = min(a, b) >= FIRST_PIECE  # lone bytes never merge
                joined = self.numbers.get(self.pieces[a] + self.pieces[b]) if known else None
                if joined is not None:
                    heapq.heappush(heap, (-self.scores[joined], left, a, b, joined))

        for k in range(count - 1):
            offer(k)
        while heap:
            _, left, a, b, joined = heapq.heappop(heap)
            right = after[left]
            if tokens[left] != a or right >= count or tokens[right] != b:
                continue  # one of the two has merged since
            tokens[left], tokens[right] = joined, -1
            after[left] = after[right]
            if after[left] < count:
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [token for token in tokens if token >= 0]


def read_scored(data: bytes, size: int) -> ScoredTokens:
    """A tokenizer.bin of `size` tokens."""
    pieces, scores, at = list[bytes](), list[float](), 4
    for number in range(size):
        if at + 8 > len(data):
            raise DataError(f"the tokenizer's file ends at token {number}; expected {size}.")
        score, length = struct.unpack("<fi", data[at : at + 8])
        pieces.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    if at != len(data):
        raise DataError(f"the tokenizer's file has {len(data)} bytes; {size} tokens take {at}.")
    return ScoredTokens(pieces, scores, {piece: k for k, piece in enumerate(pieces) if k >= FIRST_PIECE})
