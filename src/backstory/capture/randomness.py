"""The states of the generators that training draws from: torch's on the CPU and on CUDA, Python's `random`, NumPy's global one.

A state is a tensor: torch's bytes (CUDA's devices one below the other), or numbers that float64 holds exactly: the 624 words of a Mersenne
twister and its position, then whether a normal number waits to be drawn, and the number.
"""

import random
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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


class Followed:
    """The states of the generators from time to time, made into tensors only where they have changed: most steps draw nothing."""

    def __init__(self) -> None:
        self._raw: tuple[Any, ...] | None = None
        self._states: Generators = {}
        self._sums: tuple[int, ...] = ()

    def now(self) -> tuple[Generators, tuple[int, ...]]:
        """The states, and their checksums."""
        if torch.cuda.is_available():
            states = generators()
            return states, checksums(states)
        raw = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
        if self._raw is None or not _alike(raw, self._raw):
            self._raw, self._states = raw, generators()
            self._sums = checksums(self._states)
        return self._states, self._sums


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    (x, python, numpy), (y, other, another) = a, b
    if not torch.equal(x, y) or python != other:
        return False
    if numpy["bit_generator"] != "MT19937" or another["bit_generator"] != "MT19937":
        return False
    same = all(numpy[name] == another[name] for name in ("has_gauss", "gauss"))
    words, others = numpy["state"], another["state"]
    return same and words["pos"] == others["pos"] and bool((words["key"] == others["key"]).all())


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


@contextmanager
def own_randomness() -> Iterator[None]:
    """Whatever is drawn inside, the generators are afterwards as they were."""
    before = generators()
    try:
        yield
    finally:
        seed(before)


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
