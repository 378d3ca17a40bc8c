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
    """The generators' states in their own forms: quick to take and to compare, where they are not stored."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Mapping[str, Any]
    cuda: Sequence[Tensor]

    def differ(self, others: "States") -> bool:
        """Whether something was drawn between the two."""
        same = torch.equal(self.torch, others.torch) and self.python == others.python
        return not (same and _equal(self.numpy, others.numpy) and all(map(torch.equal, self.cuda, others.cuda)))

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # type: ignore[arg-type]
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(np.array_equal(a, b))


def states() -> States:
    """Of all generators as they are now."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()
    return States(torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False), cuda)


class Followed:
    """The states of the generators from time to time, made into tensors only where they have changed: most steps draw nothing."""

    def __init__(self) -> None:
        self._last: States | None = None
        self._states: Generators = {}
        self._sums: tuple[int, ...] = ()

    def now(self) -> tuple[Generators, tuple[int, ...]]:
        """The states, and their checksums."""
        current = states()
        if self._last is None or current.differ(self._last):
            self._last, self._states = current, generators()
            self._sums = checksums(self._states)
        return self._states, self._sums


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
