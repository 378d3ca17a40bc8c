"""The batches of a run's steps: as they were, in the order of steps, whatever interrupts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.builders import new_run, record
from torch import Tensor

from backstory.errors import StoreError, UsageError
from backstory.store import RunStore, batches
from backstory.store.batches import MicroBatches, Packer, narrowed, unpack

BATCH: Any = (
    torch.tensor([[1, 300], [-2, 7]]),
    {"x": torch.randn(2, 3, dtype=torch.float64), "mask": torch.tensor([True, False]), "none": None, "rate": 0.5},
    [torch.tensor(3, dtype=torch.int32), "text", 4],
)


def packed(*parts: Any) -> bytes:
    packer = Packer()
    for part in parts:
        packer.add(part)
    return packer.pack()


def same(a: Any, b: Any) -> bool:
    """Copies: bit for bit, with types."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_batch_comes_back_as_it_was() -> None:
    actual = unpack(packed(BATCH, torch.arange(3)))
    assert isinstance(actual, MicroBatches)
    assert same(list(actual), [BATCH, torch.arange(3)])


def test_a_micro_batch_is_copied_when_it_is_added() -> None:
    x, packer = torch.arange(4.0), Packer()
    packer.add(x)
    x.zero_()
    assert unpack(packer.pack())[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([0, 255], torch.uint8), ([-1, 127], torch.int8), ([-1, 128], torch.int16), ([0, 1 << 40], torch.int64), ([], torch.int64)],
)  # fmt: skip
def test_whole_numbers_take_the_smallest_type(values: list[int], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.int64)
    assert narrowed(x).dtype == dtype
    assert same(unpack(packed(x))[0], x)


@pytest.mark.parametrize("batch", [object(), {"x": {1, 2}}, {1: torch.ones(1)}, torch.eye(2).to_sparse()])
def test_what_is_no_tensor_and_no_plain_value_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="a batch has a"):
        packed(batch)


def test_batches_are_committed_with_their_steps_and_truncated_with_them(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        for t in range(6):
            store.batches.put(t, packed(torch.tensor([t])))
            if t < 5:
                store.append([record(t)])
        assert len(store.batches) == 5, "the last waits for its step"
        store.truncate(3)
        assert len(store.batches) == 3
        store.batches.put(3, packed(torch.tensor([30])))
        store.batches.put(3, packed(torch.tensor([33])))  # the step before came to nothing
        store.append([record(3)])
    read = RunStore.open(tmp_path / "run")
    assert [int(read.batches.read(t)[0]) for t in range(4)] == [0, 1, 2, 33]
    assert read.verify() == []
    with pytest.raises(StoreError, match="no batch of step 4"):
        read.batches.read(4)


def test_large_batches_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WAITING", 100)
    with new_run(tmp_path / "run") as store:
        for t in range(3):
            store.batches.put(t, packed(torch.zeros(50)))
        assert len(store.batches) == 2, "ahead of their steps"
        store.batches.put(0, packed(torch.tensor([7])))  # training began anew
        store.append([record(0)])
        assert len(store.batches) == 1
        assert int(store.batches.read(0)[0]) == 7


def test_a_missing_or_changed_batch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_run(tmp_path / "run") as store:
        store.batches.put(0, packed(torch.zeros(3)))
        store.append([record(0), record(1)])
        assert "batches.lance has 1 batches, expected 2." in store.verify()
        monkeypatch.setattr("zlib.crc32", lambda data: 0)
        with pytest.raises(StoreError, match=r"batch of step 0 .*checksum mismatch"):
            store.batches.read(0)


def test_erasing_content_erases_the_batches(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.batches.put(0, packed(torch.zeros(3)))
        store.append([record(0)])
        store.erase_samples(None)
        assert len(store.batches) == 0
        assert not (tmp_path / "run" / "batches.lance").exists()
