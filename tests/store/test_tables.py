"""Lance by our rules: durable, one writer, in order, repaired at most by one version."""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from backstory.errors import DiskError, StoreError
from backstory.store import tables
from backstory.store.files import fsync
from backstory.store.tables import Table

SCHEMA = pa.schema([("x", pa.int64())])


def numbers(*x: int) -> pa.Table:
    return pa.table({"x": list(x)}, schema=SCHEMA)


def fresh(path: Path, *batches: list[int]) -> Table:
    tables.create(path, SCHEMA)
    table = Table(path, write=True)
    for batch in batches:
        table.append(numbers(*batch))
    return table


def contents(table: Table) -> list[int]:
    actual: list[int] = table.table(["x"])["x"].to_pylist()
    return actual


def manifests(path: Path) -> list[Path]:
    """Newest first: Lance counts their names down."""
    return sorted((path / "_versions").glob("*.manifest"))


def test_rows_are_found_by_position_after_deletes_and_compaction(tmp_path: Path) -> None:
    table = fresh(tmp_path / "t", [0, 1, 2], [3, 4], [5, 6, 7], [8])
    assert table.delete("x IN (1, 3, 4, 8)") == 4
    assert table.delete("x > 100") == 0
    assert contents(table) == [0, 2, 5, 6, 7]
    assert table.table(["x"], 1, 4)["x"].to_pylist() == [2, 5, 6]
    assert table.compact(1000)
    assert not table.compact(1000)
    table.append(numbers(9))
    table.cleanup()
    assert table.table(["x"], 1, 6)["x"].to_pylist() == [2, 5, 6, 7, 9]
    assert len(manifests(tmp_path / "t")) == 1
    assert contents(Table(tmp_path / "t")) == [0, 2, 5, 6, 7, 9]


def test_data_is_flushed_before_the_manifest_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = fresh(tmp_path / "t", [0, 1])
    done: list[str] = []

    def noted(path: Path) -> None:
        versions = len(manifests(tmp_path / "t"))
        done.append(f"{path.relative_to(tmp_path / 't').parts[0] if path.is_file() else path.name} at {versions}")
        fsync(path)

    monkeypatch.setattr(tables, "fsync", noted)
    table.append(numbers(2))
    assert done == ["data at 2", "data at 2", "_versions at 3", "_versions at 3", "t at 3"]
    done.clear()
    table.delete("x = 0")
    assert done == ["_deletions at 3", "_deletions at 3", "_versions at 4", "_versions at 4", "t at 4"]


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    mine = fresh(tmp_path / "t", [0])
    Table(tmp_path / "t", write=True).append(numbers(1))
    with pytest.raises(StoreError, match=r"without holding the run's lock|failed"):
        mine.append(numbers(2))


def test_a_reader_sees_new_rows_and_survives_cleanup(tmp_path: Path) -> None:
    writer = fresh(tmp_path / "t", [0], [1])
    reader = Table(tmp_path / "t")
    writer.append(numbers(2))
    writer.compact(1000)
    writer.cleanup()
    assert contents(reader) == [0, 1, 2]


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"\0" * 4096])
def test_a_damaged_last_manifest_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    fresh(tmp_path / "t.lance", [0], [1])
    bad = manifests(tmp_path / "t.lance")[0]
    bad.write_bytes(damage)
    reader = Table(tmp_path / "t.lance")
    assert contents(reader) == [0]
    assert "Open the run for writing to repair it" in reader.message
    assert bad.exists()
    writer = Table(tmp_path / "t.lance", write=True)
    assert "was moved to" in writer.message
    assert (tmp_path / "damaged" / f"t-{bad.name}").read_bytes() == damage
    writer.append(numbers(7))
    again = Table(tmp_path / "t.lance")
    assert (contents(again), again.message) == ([0, 7], "")


def test_two_damaged_manifests_are_too_many(tmp_path: Path) -> None:
    fresh(tmp_path / "t.lance", [0], [1])
    for bad in manifests(tmp_path / "t.lance")[:2]:
        bad.write_bytes(b"")
    with pytest.raises(StoreError, match="opening"):
        Table(tmp_path / "t.lance", write=True)
    assert len(manifests(tmp_path / "t.lance")) == 3
    assert not (tmp_path / "damaged").exists()


def test_a_missing_table_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="opening"):
        Table(tmp_path / "nothing")


def test_a_table_is_refused_in_a_forked_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = fresh(tmp_path / "t", [0])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (table.count, lambda: contents(table), lambda: table.append(numbers(1)), lambda: table.delete("x = 0")):
        with pytest.raises(StoreError, match="forked child"):
            use()


def test_compaction_leaves_the_disk_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = fresh(tmp_path / "t", [0], [1], [2])
    assert not table.compact(1000, least=4)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    assert not table.compact(1000)
    with pytest.raises(DiskError, match="still on disk"):
        table.compact(1000, must=True)
    assert contents(table) == [0, 1, 2]


def test_the_pinned_file_format_is_used(tmp_path: Path) -> None:
    table = fresh(tmp_path / "t", [0], [1])
    table.compact(1000)
    assert table._ds.data_storage_version == "2.0"
