"""Image formats against bytes that were written by hand."""

import struct
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray

from backstory.demo.data import formats
from backstory.demo.data.fetch import DataError

Pixels = NDArray[np.uint8]


def random(*shape: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def paeth(a: int, b: int, c: int) -> int:
    """The predictor as the PNG specification writes it, one byte at a time."""
    p = a + b - c
    return min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]


def png(pixels: Pixels, kinds: list[int], *, depth: int = 8, interlaced: int = 0) -> bytes:
    """A PNG whose row r is stored with filter kinds[r]: an encoder, byte by byte."""
    height, width, channels = pixels.shape
    flat = pixels.reshape(height, -1).tolist()
    lines = b""
    for r, row in enumerate(flat):
        up = flat[r - 1] if r else [0] * len(row)
        left = [0] * channels + row
        corner = [0] * channels + up
        guesses = [
            (0, a, b, (a + b) // 2, paeth(a, b, c))[kinds[r]]
            for a, b, c in zip(left[: len(row)], up, corner[: len(row)], strict=True)
        ]
        lines += bytes([kinds[r], *((x - g) % 256 for x, g in zip(row, guesses, strict=True))])
    colour = {1: 0, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    packed = zlib.compress(lines)
    parts = [(b"IHDR", header), (b"IDAT", packed[:9]), (b"IDAT", packed[9:]), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts
    )


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("shape", [(7, 5, 3), (3, 11, 1), (1, 1, 3), (6, 6, 4)])
def test_every_filter_is_undone(kind: int, shape: tuple[int, int, int]) -> None:
    pixels = random(*shape)
    assert np.array_equal(formats.png_pixels(png(pixels, [kind] * shape[0])), pixels)


def test_filters_may_change_from_row_to_row() -> None:
    pixels = random(20, 9, 3)
    kinds = np.random.default_rng(1).integers(0, 5, 20).tolist()
    assert np.array_equal(formats.png_pixels(png(pixels, kinds)), pixels)


def test_other_kinds_of_png_are_refused() -> None:
    pixels = random(2, 2, 3)
    for wrong in (png(pixels, [0, 0], depth=16), png(pixels, [0, 0], interlaced=1)):
        with pytest.raises(DataError, match="expected 8 bits"):
            formats.png_pixels(wrong)
    with pytest.raises(DataError, match="expected a PNG"):
        formats.png_pixels(b"GIF89a..")


def test_idx_is_the_official_layout() -> None:
    pixels, labels = random(2, 3, 4), np.array([7, 1], np.uint8)
    files = formats.to_idx(pixels, labels)
    assert files[0] == bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4]) + pixels.tobytes()
    assert files[1] == bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 1])
    assert np.array_equal(formats.idx_images(files[0]), pixels)
    assert formats.idx_labels(files[1]).tolist() == [7, 1]


def test_images_are_not_taken_for_labels() -> None:
    images, labels = formats.to_idx(random(2, 3, 4), np.array([7, 1], np.uint8))
    with pytest.raises(DataError, match="expected images"):
        formats.idx_images(labels.ljust(16, b"\0"))
    with pytest.raises(DataError, match="expected labels"):
        formats.idx_labels(images)


def test_a_batch_is_label_then_planes() -> None:
    pixels, labels = random(2, 32, 32, 3), np.array([3, 9], np.uint8)
    data = formats.to_batch(pixels, labels)
    assert len(data) == 2 * 3073
    assert (data[0], data[3073]) == (3, 9)
    assert data[1 + 1024 + 32 * 4 + 5] == pixels[0, 4, 5, 1]  # green plane, row 4, column 5
    again, numbers = formats.batch_images(data)
    assert np.array_equal(again[1, 2], pixels[1, :, :, 2])
    assert numbers.tolist() == [3, 9]
