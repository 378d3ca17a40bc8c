"""The states of the generators that training draws from: torch's on the CPU and on CUDA, Python's `random`, NumPy's global one.

A state is a tensor: torch's bytes (CUDA's devices one below the other), or numbers that float64 holds exactly: the 624 words of a Mersenne
twister and its position, then whether a normal number waits to be drawn, and the number.
"""

import random
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

KINDS = ("torch", "python", "numpy", "cuda")  # in the order of their checksums
Generators = Mapping[str, Tensor]


def generators() -> Generators:
    """The states of all generators that there are."""
    states = {"torch": torch.get_rng_state(), "python": _python()}
    given = np.random.get_state(legacy=False)
    if given["bit_generator"] == "MT19937":
        words, more = given["state"], (given["has_gauss"], given["gauss"])
        states["numpy"] = torch.from_numpy(np.concatenate([words["key"].astype(np.float64), [words["pos"], *more]]))
    if torch.cuda.is_available():
        states["cuda"] = torch.stack(torch.cuda.get_rng_state_all())
    return states


def _python() -> Tensor:
    _, words, waiting = random.getstate()
    return torch.frombuffer(array("d", (*words, waiting is not None, waiting or 0.0)), dtype=torch.float64)


def seed(states: Generators) -> None:
    """Put the generators into these states, those that are named and are there."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        *words, waits, number = states["python"].tolist()
        random.setstate((3, tuple(map(int, words)), number if waits else None))
    if "numpy" in states:
        values = states["numpy"].numpy()
        key, (position, waits, number) = values[:-3].astype(np.uint32), values[-3:].tolist()
        np.random.set_state(("MT19937", key, int(position), int(waits), number))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)


class States(NamedTuple):
    """The generators' states in their own forms: quick to take and to compare, for what is not stored."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any
    cuda: Sequence[Tensor]

    def differ(self, others: "States") -> bool:
        """Whether something was drawn between the two."""
        same = torch.equal(self.torch, others.torch) and self.python == others.python
        same &= all(np.array_equal(a, b) for a, b in zip(self.numpy, others.numpy, strict=True))
        return not (same and all(map(torch.equal, self.cuda, others.cuda)))

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def states() -> States:
    """Of all generators as they are now."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()
    return States(torch.get_rng_state(), random.getstate(), np.random.get_state(), cuda)


@contextmanager
def own_randomness() -> Iterator[None]:
    """Whatever is drawn inside, the generators are afterwards as they were."""
    before = states()
    try:
        yield
    finally:
        before.restore()


def checksums(states: Generators) -> tuple[int, ...]:
    """A CRC-32 of each of `KINDS`; 0 for one that is not there."""
    return tuple(zlib.crc32(states[kind].numpy().data) if kind in states else 0 for kind in KINDS)


def after(before: Generators, now: Generators) -> Generators:
    """`now`, sharing the memory of what has not changed: a thousand steps without draws have one state."""
    same = {kind: kind in before and torch.equal(before[kind], state) for kind, state in now.items()}
    return before if all(same.values()) else {kind: before[kind] if same[kind] else now[kind] for kind in now}


def pack(states: Generators) -> bytes:
    """A safetensors file in memory, compressed by zlib."""
    return zlib.compress(save(dict(states)), 1)


def unpack(data: bytes) -> Generators:
    """What was packed."""
    states: Generators = load(zlib.decompress(data))
    return states
