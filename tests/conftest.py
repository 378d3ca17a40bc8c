"""What every test needs: `tests.oracles` importable from anywhere, and one thread, so that sums repeat."""

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ROUNDING=noisy, as `make test-rounding` sets it, products come out with a random last bit.

    Each test has draws of its own, the same whenever it runs: with one seed for all, what two tests compute would agree.
    """
    if os.environ.get("ROUNDING") != "noisy":
        yield
        return
    from tests.rounding import NoisyRounding

    with NoisyRounding(zlib.crc32(request.node.nodeid.encode())):
        yield
