"""Tensors beside the tables, truncation, and the run as a whole."""

from pathlib import Path

import pytest
import torch
from tests.store.builders import new_run, records, rows_of

from backstory.errors import StoreError, UsageError
from backstory.store import RunStore


def test_tensors_come_back_by_name(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.save_tensors("basis", {"q": torch.eye(3), "empty": torch.zeros(0, 2)}, {"seed": "1"})
        store.save_tensors("basis", {"q": torch.eye(4)}, {"seed": "2"})
        store.save_tensors("checkpoint-000100", {"w": torch.ones(2, dtype=torch.bfloat16)})
    reader = RunStore.open(tmp_path / "run")
    assert reader.tensor_names() == ["basis", "checkpoint-000100"]
    assert torch.equal(reader.load_tensors("basis")["q"], torch.eye(4))
    assert reader.tensor_metadata("basis") == {"seed": "2"}
    assert reader.load_tensors("checkpoint-000100")["w"].dtype == torch.bfloat16
    with pytest.raises(StoreError, match="it holds: basis, checkpoint-000100"):
        reader.load_tensors("bases")
    with pytest.raises(UsageError, match="Choose another name"):
        reader.load_tensors("../basis")


def test_truncating_drops_all_that_follows(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 6) as store:
        for name in (
            "basis",
            "checkpoint-000003",
            "checkpoint-000004",
            "scale-00000003",
            "scale-00000004",
            "scale-map",
        ):
            store.save_tensors(name, {"x": torch.zeros(1)})
        for step in (2, 3):
            store.spool(step, {"x": torch.zeros(1)}, {})
        store.truncate(3)
        assert (store.n_steps(), store.n_rows(), store.spooled()) == (3, 6, [2])
        assert store.tensor_names() == ["basis", "checkpoint-000003", "scale-00000003", "scale-map"]
        store.append(records(3, 8))
        assert store.verify() == []
        rows = store.read(0, store.n_rows(), dtype=torch.float64).rows
        assert rows is not None
        assert torch.equal(rows, rows_of(0, 8))
        with pytest.raises(UsageError, match="cannot be truncated to 9"):
            store.truncate(9)
        store.truncate(0)
        assert (store.n_steps(), store.n_rows()) == (0, 0)
        store.append(records(0, 2))
    assert RunStore.open(tmp_path / "run").verify() == []


def test_readers_cannot_change_anything(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 2).close()
    reader = RunStore.open(tmp_path / "run")
    for change in (
        lambda: reader.append(records(2, 3)),
        lambda: reader.truncate(0),
        lambda: reader.save_tensors("x", {}),
        lambda: reader.delete_tensors("x"),
        lambda: reader.put_samples([]),
        lambda: reader.erase_samples(None),
        lambda: reader.spool(0, {}, {}),
        lambda: reader.clear_spool(),
        lambda: reader.write_embeddings(0, [], {}),
        lambda: reader.drop_embeddings(0),
    ):
        with pytest.raises(UsageError, match="write=True"):
            change()
    reader.close()


def test_size_counts_every_file(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 4) as store:
        before = store.size_bytes()
        store.save_tensors("x", {"x": torch.zeros(1000)})
        assert 4000 < store.size_bytes() - before < 4200
        assert (
            before
            == sum(p.stat().st_size for p in (tmp_path / "run").rglob("*") if p.is_file())
            - (tmp_path / "run/x.safetensors").stat().st_size
        )


def test_embeddings_are_in_the_layout_that_was_settled_after_the_run_was_opened(tmp_path: Path) -> None:
    """Both written and read: each layer has a scale of its own."""
    E = rows_of(0, 3) * torch.tensor([1.0, 1.0] + [1e-4] * 10)
    with new_run(tmp_path / "run", encoding="int8") as store:
        reader = RunStore.open(tmp_path / "run")
        store.relayout([2, 10])
        store.append(records(0, 3))
        store.write_embeddings(3, [(0, E)], {}, "int8")
        assert reader.n_steps() == 3
        fresh = RunStore.open(tmp_path / "run")
        found = [x.read_embeddings(3, 0, len(E), dtype=torch.float64) for x in (store, reader, fresh)]
    for x in found:
        for part in (slice(0, 2), slice(2, 12)):
            step = E[:, part].abs().amax(1, keepdim=True) / 127
            assert bool(((x - E)[:, part].abs() <= 0.5001 * step).all())
