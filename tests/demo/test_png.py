"""PNG bytes that a browser reads; decoded here by hand."""

import struct
import zlib

import torch

from backstory.demo.png import png


def test_pixels_come_back() -> None:
    image = torch.tensor([[0.0, 1.0, 0.5], [0.25, 0.75, 2.0]])
    found = png(image)
    assert found.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colour = struct.unpack(">IIBB", found[16:26])
    assert (width, height, depth, colour) == (3, 2, 8, 0)
    start = found.index(b"IDAT")
    size = struct.unpack(">I", found[start - 4 : start])[0]
    lines = zlib.decompress(found[start + 4 : start + 4 + size])
    assert list(lines) == [0, 255, 0, 127, 0, 191, 63, 0]
