"""Keep Backstory's own computations out of the user's autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

HALF = (torch.float16, torch.bfloat16)


@contextmanager
def own_precision(device: torch.device | str = "cpu") -> Iterator[None]:
    """Outside of any autocast that surrounds the caller on this device; also a decorator."""
    if not in_autocast(device):
        yield
        return
    with torch.autocast(torch.device(device).type, enabled=False):
        yield


def in_autocast(device: torch.device | str) -> bool:
    """Whether autocast surrounds the caller on this device."""
    kind = torch.device(device).type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
