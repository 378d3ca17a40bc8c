"""A run whose bytes changed says so, and says where."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from tests.store.builders import diagonal_record, diagonal_run, new_run, record, records, split_record, split_run

from backstory.store import RunStore


def flip(path: Path, needle: bytes) -> None:
    """Flip one bit of the only place in a table's data that holds `needle`."""
    hits = [(p, i) for p in (path / "data").iterdir() if (i := p.read_bytes().find(needle)) >= 0]
    assert len(hits) == 1, f"{needle!r} is in {len(hits)} files, expected 1"
    file, at = hits[0]
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def needle_of(column: str, encoding: str) -> bytes:
    """Bytes that step 4 has in one column, and nothing else has."""
    if column == "sample":
        return b"sample-4-1"
    if column == "rows":
        return bytes(record(4).rows[1].numpy().tobytes())
    return bytes(getattr(record(4), column)[1:2].numpy().tobytes())


@pytest.mark.parametrize("column", ["rows", "weight", "loss", "gdot", "sample"])
def test_a_flipped_bit_is_found_with_its_step(tmp_path: Path, column: str) -> None:
    with new_run(tmp_path / "run", 9) as store:
        assert store.verify() == []
    flip(tmp_path / "run/rows.lance", needle_of(column, "float64"))
    assert RunStore.open(tmp_path / "run").verify() == [
        "step 4: its rows have changed since they were written (checksum mismatch)."
    ]


@pytest.mark.parametrize("encoding", ["int8", "float16"])
def test_a_flipped_scale_is_found(tmp_path: Path, encoding: str) -> None:
    with new_run(tmp_path / "run", 9, encoding):
        pass
    scale = record(4).rows[1, 5:].abs().max() / (127 if encoding == "int8" else 1)
    flip(tmp_path / "run/rows.lance", scale.float().numpy().tobytes())
    assert len(RunStore.open(tmp_path / "run").verify()) == 1


CHANGED = ["step 4: its rows have changed since they were written (checksum mismatch)."]


def test_a_flipped_bit_of_the_diagonal_is_found_with_its_step(tmp_path: Path) -> None:
    with diagonal_run(tmp_path / "run", 9) as store:
        assert store.verify() == []
    P = diagonal_record(4).P
    assert P is not None
    flip(tmp_path / "run/steps.lance", P.float().numpy().tobytes()[8:24])
    assert RunStore.open(tmp_path / "run").verify() == CHANGED


def test_the_diagonal_of_another_step_is_found(tmp_path: Path) -> None:
    with diagonal_run(tmp_path / "run", 6) as store:
        lines = store._steps.table(store._steps.schema.names, 4, 6)
        swapped = lines.set_column(
            lines.schema.get_field_index("P"), lines.schema.field("P"), lines["P"].take(pa.array([1, 0]))
        )
        store._steps.delete("step >= 4")
        store._steps.append(swapped)
    assert RunStore.open(tmp_path / "run").verify() == [CHANGED[0], CHANGED[0].replace("step 4", "step 5")]


@pytest.mark.parametrize("column", ["curvature", "kappa", "hdot"])
def test_a_flipped_bit_of_a_split_run_is_found_with_its_step(tmp_path: Path, column: str) -> None:
    split_run(tmp_path / "run", 9).close()
    flip(tmp_path / "run/rows.lance", getattr(split_record(4), column)[1, 2].numpy().tobytes())
    assert RunStore.open(tmp_path / "run").verify() == CHANGED


def test_rows_of_another_step_are_found(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        store._rows.delete("step = 2 AND pos = 1")
        store._rows.append(store._rows.table(store._rows.schema.names, 0, 1))
        actual = store.verify()
    assert any(line.startswith("step 2: its rows have wrong steps or positions") for line in actual)


def test_missing_data_files_are_reported_by_step(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 3)
    first = set((tmp_path / "run/rows.lance/data").iterdir())
    store.append(records(3, 6))
    store.close(compact=False)
    for file in first:
        file.unlink()
    actual = RunStore.open(tmp_path / "run").verify()
    assert [line.split(":")[0] for line in actual] == [f"step {t} cannot be read" for t in range(3)]


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 1) as store:
        store.save_tensors("basis", {"q": torch.eye(3)})
        file = tmp_path / "run/basis.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        assert ["basis.safetensors is damaged" in line for line in store.verify()] == [True]


def test_steps_that_do_not_follow_each_other_are_found(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        lines = store._steps.table(store._steps.schema.names, 0, 5)
        store._steps.delete("step >= 2")
        store._steps.append(lines.take([3, 4]))
    actual = RunStore.open(tmp_path / "run").verify()
    assert actual[0] == "row 2 of steps is step 3, expected step 2."
