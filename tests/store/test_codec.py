"""Rows and steps as columns and back."""

from pathlib import Path

import pytest
import torch
from tests.store.builders import KEYS, new_run, record, records, rows_of
from torch import Tensor

from backstory.errors import UsageError
from backstory.maths.encoding import DTYPES
from backstory.store import RunStore, codec

TOLERANCE = {"int8": 0.5 / 127, "float16": 2**-11, "float32": 2**-24, "float64": 0.0}


def block_maxima(rows: Tensor) -> Tensor:
    """The largest entry of each block of 5 and 7, at every entry: the scale that rounding is relative to."""
    first, second = rows[:, :5].abs().amax(1, keepdim=True), rows[:, 5:].abs().amax(1, keepdim=True)
    return torch.cat([first.expand(-1, 5), second.expand(-1, 7)], dim=1)


@pytest.mark.parametrize("encoding", list(DTYPES))
def test_rows_come_back_within_the_rounding_of_their_encoding(tmp_path: Path, encoding: str) -> None:
    with new_run(tmp_path / "run", 7, encoding) as store:
        back = store.read(0, store.n_rows(), dtype=torch.float64).rows
        assert store.verify() == []
    assert back is not None
    error = ((back - rows_of(0, 7)).abs() / block_maxima(rows_of(0, 7))).max().item()
    assert error <= 1.01 * TOLERANCE[encoding], (
        f"{encoding}: rows differ by {error:.3g} of the largest entry of their block, allowed "
        f"{TOLERANCE[encoding]:.3g}. An error near 1 means that scales and blocks are mismatched."
    )


@pytest.mark.parametrize("encoding", list(DTYPES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_are_writable_and_of_the_dtype_asked(tmp_path: Path, encoding: str, dtype: torch.dtype) -> None:
    with new_run(tmp_path / "run", 3, encoding) as store:
        rows = store.read(0, 6, dtype=dtype).rows
        assert rows is not None
        assert rows.dtype == dtype
        before = rows.clone()
        rows.zero_()
        again = store.read(0, 6, dtype=dtype).rows
        assert again is not None
        assert torch.equal(again, before)


@pytest.mark.parametrize("encoding", ["float16", "float32"])
def test_decoding_leaves_what_was_read_alone(encoding: str) -> None:
    columns = [codec.vectors(part) for part in codec.encoded(rows_of(0, 3).float(), [5, 7], encoding)]
    before = columns[0].to_pylist()
    codec.decoded(columns, [5, 7], DTYPES[encoding]).zero_()
    assert columns[0].to_pylist() == before


def test_scalars_come_back_exactly(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 6, "int8") as store:
        block = store.read(1, 8, samples=True, rows=False)
    expected = records(0, 6)
    for name in ("weight", "loss", "gdot"):
        whole = torch.cat([getattr(r, name) for r in expected])[1:8]
        assert torch.equal(getattr(block, name).nan_to_num(9), whole.nan_to_num(9))
        assert getattr(block, name).dtype == torch.float64
    assert block.samples == [name for r in expected for name in r.samples][1:8]
    assert block.step.tolist() == [1, 1, 2, 2, 2, 3, 4]
    assert block.pos.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert (block.row_start, block.rows, block.step.dtype) == (1, None, torch.int64)


def test_steps_come_back_exactly(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 6) as store:
        steps = store.steps(2, 5)
    assert steps.step.tolist() == [2, 3, 4]
    assert steps.row_start.tolist() == [3, 6, 7]
    assert steps.rows.tolist() == [3, 1, 2]
    assert steps.clip.tolist() == [1 / 3, 1 / 4, 1 / 5]
    assert steps.norm.tolist() == [2.0, 3.0, 4.0]
    assert {key: steps.groups[key].tolist() for key in KEYS} == {
        key: [list(record(t).groups[key]) for t in (2, 3, 4)] for key in KEYS
    }


def test_slabs_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SLAB", 3 * 12 * 8)
    monkeypatch.setattr(codec, "slab_rows", lambda width, dtype: 4)
    with new_run(tmp_path / "run", 9) as store:
        rows = store.read(2, 17, dtype=torch.float64).rows
        assert rows is not None
        assert torch.equal(rows, rows_of(0, 9)[2:17])
        assert store.verify() == []


def test_an_empty_step_and_an_empty_range(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        assert len(store.steps().step) == 0
        assert store.steps().groups["rate"].shape == (0, 2)
        store.append([record(0, size=0), record(1), record(2, size=0)])
        assert store.steps().rows.tolist() == [0, 2, 0]
        block = store.read(2, 2, samples=True)
        assert block.rows is not None
        assert block.rows.shape == (0, 12)
        assert block.samples == []
        assert store.verify() == []
        assert [b.step.tolist() for b in store.backward(3, dtype=torch.float32)] == [[1, 1]]


def test_scalars_stream_without_vectors(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5, "float16") as store:
        rows = store.scalars("rows").read_all()
        steps = store.scalars("steps").read_all()
        assert store.scalars("samples").read_all().num_rows == 0
    assert rows.column_names == ["step", "pos", "sample", "weight", "loss", "gdot"]
    assert rows.num_rows == 9
    assert steps["tau_1"].to_pylist() == [record(t).groups["tau"][1] for t in range(5)]
    again = RunStore.open(tmp_path / "run").scalars("rows").read_all()
    assert again.drop_columns("loss").equals(rows.drop_columns("loss"))


def test_scalars_of_an_empty_run_have_columns_and_no_rows(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        for name in ("rows", "steps", "samples"):
            table = store.scalars(name).read_all()
            assert table.num_rows == 0
            assert table.num_columns > 3
        with pytest.raises(UsageError, match="expected rows, steps or samples"):
            store.scalars("losses")
