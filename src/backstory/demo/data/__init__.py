"""The demos' data: digits and text of eight domains, checked by hash, cached."""

from .domains import corpus
from .fetch import DataError, cache_dir
from .small import Images, digits_8x8, mnist_5k
from .tokens import Bytes, Document, Sequences, cut

__all__ = [
    "Bytes",
    "DataError",
    "Document",
    "Images",
    "Sequences",
    "cache_dir",
    "corpus",
    "cut",
    "digits_8x8",
    "mnist_5k",
]
