"""MNIST's idx files: out of a package or a folder, checked, as images."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from backstory.demo.data.fetch import DataError, Files, Package, cache_dir
from experiments.data import mnist

RANDOM = np.random.default_rng(0)
PIXELS = {
    "train": RANDOM.integers(0, 256, (3, 28, 28), np.uint8),
    "t10k": RANDOM.integers(0, 256, (2, 28, 28), np.uint8),
}
LABELS = {"train": [5, 0, 4], "t10k": [7, 2]}


def files() -> Files:
    made = {}
    for part, pixels in PIXELS.items():
        made[f"{part}-images-idx3-ubyte"] = struct.pack(">4I", 2051, len(pixels), 28, 28) + pixels.tobytes()
        made[f"{part}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, len(pixels)) + bytes(LABELS[part])
    return made


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(package: Package, *patterns: str) -> Files:
        return {f"package/data/{name}": data for name, data in files().items()}

    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mnist, "MNIST", {n: hashlib.sha256(d).hexdigest() for n, d in files().items()})
    monkeypatch.setattr(mnist, "unpack", unpack)


def test_images_and_labels_come_out_of_the_package_and_out_of_a_folder() -> None:
    for parts in (mnist.mnist(), mnist.mnist(cache_dir() / "mnist")):
        for part, name in zip(parts, PIXELS, strict=True):
            assert part.name == f"MNIST, {name}"
            assert torch.equal(part.x, torch.from_numpy(PIXELS[name][:, None].copy()) / 255)
            assert part.y.tolist() == LABELS[name]


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, data in files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"other")
    with pytest.raises(DataError, match="Get the official file"):
        mnist.mnist(tmp_path)
    with pytest.raises(DataError, match="idx file of images"):
        mnist.pixels(files()["t10k-labels-idx1-ubyte"].ljust(16))
    with pytest.raises(DataError, match="idx file of labels"):
        mnist.labels(files()["t10k-images-idx3-ubyte"])
