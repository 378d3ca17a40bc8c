"""Hashes of a model's weights, the same on every device and under every wrapper, and of batches."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel and torch.compile


def canonical(name: str) -> str:
    """A parameter's name without the prefixes that wrappers add."""
    while name.startswith(WRAPPERS):
        name = name.removeprefix(WRAPPERS[0]).removeprefix(WRAPPERS[1])
    return name.replace("._orig_mod.", ".")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under canonical names, on the CPU, detached copies."""
    return {canonical(k): v.detach().cpu().contiguous().clone() for k, v in model.state_dict().items()}


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights, as 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, value in sorted((canonical(k), v) for k, v in model.state_dict().items()):
        _add(digest, name, value)
    return digest.hexdigest()[:32]


def batch_fingerprint(batch: Any) -> str:
    """The same over the tensors of a batch (a tensor, or tuples, lists and mappings of them) and what else it holds."""
    digest = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            _add(digest, name, value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                add(f"{name}.{key}", value[key])
        elif isinstance(value, tuple | list):
            for i, item in enumerate(value):
                add(f"{name}.{i}", item)
        else:
            digest.update(f"{name}:{value!r};".encode())

    add("", batch)
    return digest.hexdigest()[:32]


def _add(digest: "hashlib._Hash", name: str, value: Tensor) -> None:
    data = value.detach().cpu().contiguous()
    digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"")
