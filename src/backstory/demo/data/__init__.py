"""The demos' data: digits, text of eight domains and a small language model, checked by hash, cached."""

from .domains import corpus
from .fetch import DataError, cache_dir
from .models import stories15m
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
    "stories15m",
]
