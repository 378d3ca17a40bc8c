"""The demos' data: digits and text of eight domains, checked by hash, cached."""

from .domains import corpus, mend
from .fetch import DataError, cache_dir
from .small import Images, digits_8x8, mnist_5k
from .tokens import Bytes, Document, Pieces, Sequences, Tokenizer, cut, decode

__all__ = [
    "Bytes",
    "DataError",
    "Document",
    "Images",
    "Pieces",
    "Sequences",
    "Tokenizer",
    "cache_dir",
    "corpus",
    "cut",
    "decode",
    "digits_8x8",
    "mend",
    "mnist_5k",
]
