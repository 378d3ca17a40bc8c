"""What Backstory computes inside a user's training loop keeps its own precision.

Knows nothing of layers or rows.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def own_precision(device: torch.device | str) -> AbstractContextManager[Any]:
    """Outside of any autocast that surrounds the caller on this device."""
    kind = torch.device(device).type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
