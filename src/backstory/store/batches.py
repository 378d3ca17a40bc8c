"""The batches of a run's steps: what the model saw, as tensors, so that the training can be replayed in another process.

    batches  step, batch (bytes of a safetensors file), crc

A batch is a tensor, or tuples, lists and dicts of tensors, numbers, texts and None; a step with accumulation has several
micro-batches in order. Whole numbers are stored in the smallest type that holds them, and come back in their own.
The batch of a step is committed before the step itself; batches beyond the committed steps belong to no step, and are replaced.
"""

import json
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor

from ..errors import StoreError, UsageError
from .files import fsync, size_bytes
from .tables import Table, create

SCHEMA = pa.schema([("step", pa.int32()), ("batch", pa.large_binary()), ("crc", pa.int64())])
WAITING = 32 << 20  # bytes that wait for their step's commit in memory
FRAGMENT = 256 << 20  # bytes in one compacted fragment
NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
WHOLE = (torch.int16, torch.int32, torch.int64)


class MicroBatches(list[Any]):
    """The micro-batches of one step, in order."""


class Packer:
    """Copies the micro-batches of one step; refuses what is neither a tensor nor a plain value."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._tree: list[dict[str, Any]] = []

    def add(self, batch: Any) -> None:
        """The next micro-batch, as it is now."""
        self._tree.append(_flat(batch, self._tensors))

    def pack(self) -> bytes:
        """All of them as bytes."""
        return save(self._tensors, {"tree": json.dumps(self._tree)})


def unpack(data: bytes) -> MicroBatches:
    """The micro-batches that a `Packer` was given."""
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    tree = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tree"])
    return MicroBatches(_built(node, tensors) for node in tree)


def _flat(value: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A value as JSON; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise UsageError(f"a batch has a tensor with the layout {value.layout}, which cannot be stored.")
        name = str(len(tensors))
        tensors[name] = narrowed(value.detach().cpu())
        return {"tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _flat(item, tensors) for key, item in value.items()}}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_flat(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UsageError(
        f"a batch has a value of type {type(value).__name__}, which is neither a tensor nor a plain value."
    )


def _built(node: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "tensor" in node:
        return tensors[node["tensor"]].to(getattr(torch, node["dtype"]))
    if "dict" in node:
        return {key: _built(item, tensors) for key, item in node["dict"].items()}
    if "tuple" in node:
        return tuple(_built(item, tensors) for item in node["tuple"])
    return [_built(item, tensors) for item in node["list"]] if "list" in node else node["value"]


def narrowed(x: Tensor) -> Tensor:
    """Whole numbers in the smallest type that holds them, in memory of their own."""
    if x.dtype not in WHOLE or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    least, most = (int(end) for end in torch.aminmax(x))
    for dtype in NARROW:
        if torch.iinfo(dtype).min <= least and most <= torch.iinfo(dtype).max and dtype.itemsize < x.dtype.itemsize:
            return x.to(dtype, memory_format=torch.contiguous_format)
    return x.clone(memory_format=torch.contiguous_format)


class Batches:
    """`batches.lance` of a run; the table is there once it has a batch."""

    def __init__(self, folder: Path, check_writable: Callable[[], None], mutex: threading.RLock) -> None:
        self.path = folder / "batches.lance"
        self._check_writable, self._mutex = check_writable, mutex
        self._waiting: dict[int, bytes] = {}  # step -> batch, until its step is committed
        self._light = threading.Lock()  # held for a moment only, so that training does not wait out a commit
        self._opened: Table | None = None
        self._writes = False  # whether it is open for writing

    def put(self, step: int, batch: bytes) -> None:
        """Hand over the batch of a step that is about to be recorded; in the place of one of a step that came to nothing."""
        with self._light:
            self._waiting[step] = batch
            much = sum(map(len, self._waiting.values())) > WAITING
        if much:
            self.commit(step)

    def commit(self, before: int) -> None:
        """Make the batches of steps before this one durable."""
        with self._mutex:
            with self._light:
                ready = {t: self._waiting.pop(t) for t in sorted(self._waiting) if t < before}
            if not ready:
                return
            self._check_writable()
            if (n := len(self)) > min(ready):
                self.truncate(n := min(ready))
            if n != min(ready):
                raise StoreError(f"expected the batch of step {n} next, got that of step {min(ready)}.")
            if not self.path.exists():
                create(self.path, SCHEMA)
            crcs = [zlib.crc32(x) for x in ready.values()]
            self._table(write=True).append(pa.table([list(ready), list(ready.values()), crcs], schema=SCHEMA))

    def forget(self) -> None:
        """Drop what waits."""
        with self._light:
            self._waiting.clear()

    def __len__(self) -> int:
        return self._table().count() if self.path.exists() else 0

    def read(self, step: int) -> MicroBatches:
        """The micro-batches of one step."""
        if not 0 <= step < len(self):
            raise StoreError(f"{self.path.parent} has no batch of step {step}: it has {len(self)}.")
        row = self._table().take(["step", "batch", "crc"], [step]).to_pylist()[0]
        if row["step"] != step or zlib.crc32(row["batch"]) != row["crc"]:
            raise StoreError(
                f"the batch of step {step} in {self.path} has changed since it was written (checksum mismatch). "
                "Restore it from a copy of the run."
            )
        return unpack(row["batch"])

    def truncate(self, step: int) -> None:
        """Drop the batches from `step` on."""
        if self.path.exists():
            self._check_writable()
            self._table(write=True).delete(f"step >= {step}")

    def drop(self) -> None:
        """Delete all batches from the disk."""
        with self._mutex:
            self.forget()
            self._opened = None
            if self.path.exists():
                self._check_writable()
                shutil.rmtree(self.path)
                fsync(self.path.parent)

    def copy_to(self, other: "Batches") -> None:
        """Write these batches into a run that has none."""
        if self.path.exists():
            shutil.copytree(self.path, other.path)

    def tidy(self) -> None:
        """Join small fragments, and delete old versions."""
        if self.path.exists():
            table = self._table(write=True)
            mean = size_bytes(self.path) // max(1, table.count())
            table.compact(max(8, FRAGMENT // max(1, mean)), least=8)
            table.cleanup()

    def damage(self, steps: int) -> Iterator[str]:
        """Sentences about batches of the first `steps` steps that are missing or not what was written."""
        if self.path.exists():
            if (n := len(self)) < steps:
                yield f"batches.lance has {n} batches, expected {steps}."
            for step in range(min(n, steps)):
                try:
                    self.read(step)
                except (StoreError, safetensors.SafetensorError) as error:
                    yield str(error)

    def _table(self, *, write: bool = False) -> Table:
        if self._opened is None or (write and not self._writes):
            self._opened, self._writes = Table(self.path, write=write), write
        self._opened.refresh()
        return self._opened
