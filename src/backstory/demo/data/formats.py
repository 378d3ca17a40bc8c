"""Image file formats, from bytes to arrays and back: MNIST's idx, CIFAR's binary batches, PNG.

idx:    a big-endian header (2051, N, H, W) and N·H·W pixels; for labels (2049, N) and N labels.
batch:  10,000 records of 1 + 3,072 bytes: the label, then the red, green and blue planes of 32 × 32.
PNG:    every byte is stored as its difference from a prediction out of its left (a), upper (b) and corner (c)
        neighbours. Pixels on one anti-diagonal need earlier diagonals only, so a diagonal is undone at a time.

Shapes:  N images, H × W pixels, C channels; all arrays are uint8.
"""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .fetch import DataError

Array = NDArray[np.uint8]
IMAGES, LABELS = 2051, 2049
SIDE, RECORD = 32, 3073
CHANNELS = {0: 1, 2: 3, 4: 2, 6: 4}  # of a PNG's colour type


def idx_images(data: bytes) -> Array:
    """(N, H, W) pixels of an idx file."""
    kind, n, height, width = struct.unpack(">4I", data[:16])
    if kind != IMAGES:
        raise DataError(f"found an idx file of kind {kind}; expected images ({IMAGES}).")
    return np.frombuffer(data, np.uint8, offset=16).reshape(n, height, width)


def idx_labels(data: bytes) -> Array:
    """(N,) labels of an idx file."""
    kind, n = struct.unpack(">2I", data[:8])
    if kind != LABELS:
        raise DataError(f"found an idx file of kind {kind}; expected labels ({LABELS}).")
    return np.frombuffer(data, np.uint8, offset=8).reshape(n)


def to_idx(pixels: Array, labels: Array) -> tuple[bytes, bytes]:
    """The two idx files of (N, H, W) pixels and (N,) labels."""
    return struct.pack(">4I", IMAGES, *pixels.shape) + pixels.tobytes(), struct.pack(
        ">2I", LABELS, len(labels)
    ) + labels.tobytes()


def batch_images(data: bytes) -> tuple[Array, Array]:
    """`(pixels (N, 3, 32, 32), labels (N,))` of one of CIFAR's binary batches."""
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0]


def to_batch(pixels: Array, labels: Array) -> bytes:
    """A binary batch of (N, 32, 32, 3) pixels and (N,) labels."""
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)  # (N, 3072)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


def png_pixels(data: bytes) -> Array:
    """(H, W, C) pixels of a PNG with 8 bits a channel, without palette or interlacing."""
    chunks = list(_chunks(data))
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if depth != 8 or interlaced or colour not in CHANNELS:
        raise DataError(f"found a PNG of depth {depth}, colour type {colour}; expected 8 bits, no palette.")
    lines = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    rows = np.frombuffer(lines, np.uint8).reshape(height, 1 + width * CHANNELS[colour])
    return _undo(rows[:, 0], rows[:, 1:].reshape(height, width, CHANNELS[colour]))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise DataError(f"found a file that begins with {data[:8]!r}; expected a PNG.")
    at = 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        yield kind, data[at + 8 : at + 8 + size]
        at += size + 12


def _undo(kinds: Array, stored: Array) -> Array:
    """Add the predictions back, one anti-diagonal (row + column = d) at a time."""
    height, width, channels = stored.shape
    whole = np.zeros((height + 1, width + 1, channels), np.int16)  # a row and a column of zeros before the image
    whole[1:, 1:] = stored
    line = whole.reshape(-1, channels)  # pixel (r, x) at (r + 1) (width + 1) + x + 1: a step of `width` down a diagonal
    for d in range(height + width - 1):
        low, high = max(0, d - width + 1), min(height - 1, d)
        start, count = (low + 1) * width + d + 2, high - low + 1
        x, a, b, c = (line[start - back :: width][:count] for back in (0, 1, width + 1, width + 2))  # (rows, C)
        x += _prediction(kinds[low : high + 1, None], a, b, c)
        x &= 255
    return whole[1:, 1:].astype(np.uint8)


def _prediction(kind: Array, a: NDArray[np.int16], b: NDArray[np.int16], c: NDArray[np.int16]) -> NDArray[np.int16]:
    """PNG's five filters: nothing, left, up, mean of both, Paeth."""
    p, q, r = abs(b - c), abs(a - c), abs(a + b - 2 * c)
    paeth = np.where((p <= q) & (p <= r), a, np.where(q <= r, b, c))
    return np.select([kind == 1, kind == 2, kind == 3, kind == 4], [a, b, (a + b) >> 1, paeth], np.int16(0))
