"""Real data for demos and experiments: images, text, tokenizers and a small language model, checked by hash, cached."""

from .domains import corpus
from .fetch import DataError, cache_dir
from .gpt2 import gpt2_tokenizer
from .images import Images, cifar10, fashion_mnist, mnist
from .models import stories15m
from .small import digits_8x8, mnist_5k
from .text import Document, Treebank, from_rows, penn_treebank, read_folder
from .tokens import Bytes, Sequences, Tokenizer, cut

__all__ = [
    "Bytes",
    "DataError",
    "Document",
    "Images",
    "Sequences",
    "Tokenizer",
    "Treebank",
    "cache_dir",
    "cifar10",
    "corpus",
    "cut",
    "digits_8x8",
    "fashion_mnist",
    "from_rows",
    "gpt2_tokenizer",
    "mnist",
    "mnist_5k",
    "penn_treebank",
    "read_folder",
    "stories15m",
]
