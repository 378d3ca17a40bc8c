"""Which words of a training text also stand in the query's text."""

import re
from typing import NamedTuple

WORD = re.compile(r"\w+")
SHORTEST = 4  # letters: shorter words are in almost any two texts


class Piece(NamedTuple):
    """A part of a text; all parts together are the text."""

    text: str
    common: bool


def common_words(text: str, query: str, shortest: int = SHORTEST) -> set[str]:
    """Words of at least `shortest` letters in both texts, whatever their case."""
    here, there = ({w.casefold() for w in WORD.findall(x)} for x in (text, query))
    return {w for w in here & there if len(w) >= shortest}


def marked(text: str, query: str, shortest: int = SHORTEST) -> list[Piece]:
    """The text in pieces, the words in common with the query marked."""
    common, out, end = common_words(text, query, shortest), [], 0
    for found in WORD.finditer(text):
        if found[0].casefold() in common:
            out += [Piece(text[end : found.start()], False), Piece(found[0], True)]
            end = found.end()
    return [piece for piece in (*out, Piece(text[end:], False)) if piece.text]
