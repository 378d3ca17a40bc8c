"""Rows and steps as columns and back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.store.builders import (
    KEYS,
    diagonal_record,
    diagonal_run,
    new_run,
    record,
    records,
    rows_of,
    split_record,
    split_run,
)
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
    out = torch.empty(len(columns[0]), 12, dtype=DTYPES[encoding])
    codec.decode_into(out, columns, [5, 7])
    assert out.any(), "nothing was written"
    out.zero_()
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
        assert [b.step.tolist() for b in store.chunks(3, dtype=torch.float32)] == [[1, 1]]


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
        with pytest.raises(UsageError, match="table must be 'rows', 'steps' or 'samples'"):
            store.scalars("losses")


# split runs: no gradient rows of their own


@pytest.mark.parametrize("encoding", list(DTYPES))
def test_the_gradient_of_a_split_run_is_the_sum_of_its_curvature_rows(tmp_path: Path, encoding: str) -> None:
    made = [split_record(t) for t in range(7)]
    split_run(tmp_path / "run", 7, encoding).close()
    store = RunStore.open(tmp_path / "run")
    whole = store.read(0, store.n_rows(), dtype=torch.float64, curvature=True)
    only = store.read(0, store.n_rows(), dtype=torch.float64)
    assert whole.rows is not None
    assert whole.curvature is not None
    assert only.rows is not None
    assert (only.curvature, only.kappa, only.hdot) == (None, None, None)
    assert torch.equal(only.rows, whole.rows)
    h = torch.cat([r.curvature for r in made if r.curvature is not None])
    size = torch.stack([block_maxima(x) for x in h.unbind(1)], 1)  # (n, R, 12)
    allowed = 1.01 * TOLERANCE[encoding] * size
    assert ((whole.curvature - h).abs() <= allowed).all(), (
        "An error near 1 means that scales and blocks are mismatched."
    )
    assert ((whole.rows - torch.cat([r.rows for r in made])).abs() <= allowed.sum(1) + 1e-14).all()
    for name in ("kappa", "hdot", "weight", "gdot"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(r, name) for r in made]))
    assert not {"g", "s"} & set(store._rows.schema.names)
    assert store.verify() == []


def test_a_split_run_without_rows_asked_reads_none(tmp_path: Path) -> None:
    with split_run(tmp_path / "run", 3) as store:
        block = store.read(1, 4, rows=False, samples=True)
        assert (block.rows, block.curvature) == (None, None)
        assert block.samples == [name for t in range(3) for name in split_record(t).samples][1:4]
        block = store.read(0, 6, rows=False, curvature=True)
        assert block.rows is None
        assert block.curvature is not None


def test_an_empty_step_and_an_empty_range_of_a_split_run(tmp_path: Path) -> None:
    """No rows of three curvature rows of twelve numbers are still (0, 3, 12)."""
    nothing = torch.zeros(0, 3, dtype=torch.float64)
    empty = replace(record(2, size=0), curvature=torch.zeros(0, 3, 12), kappa=nothing, hdot=nothing)
    with split_run(tmp_path / "run", 2) as store:
        store.append([empty])
        for lo, hi in ((0, 0), (3, 3)):
            block = store.read(lo, hi, curvature=True)
            assert block.rows is not None
            assert block.curvature is not None
            assert (block.rows.shape, block.curvature.shape) == ((0, 12), (0, 3, 12))
        assert [len(b.step) for b in store.chunks(3, dtype=torch.float32, chunk_bytes=1)] == [0, 2, 1]
        assert store.verify() == []


# the optimizer's diagonal


def test_the_diagonal_comes_back_in_float32(tmp_path: Path) -> None:
    expected = torch.stack([x for t in range(6) if (x := diagonal_record(t).P) is not None])
    with diagonal_run(tmp_path / "run", 4) as store:
        store.append([diagonal_record(t) for t in range(4, 6)])
        actual = store.diagonal(1, 5)
        assert actual is not None
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected[1:5].float())
        actual.zero_()
        again = store.diagonal(1, 5)
        assert again is not None
        assert torch.equal(again, expected[1:5].float())
        none = store.diagonal(3, 3)
        assert none is not None
        assert none.shape == (0, 12)
        with pytest.raises(UsageError, match="are out of range"):
            store.diagonal(0, 7)
        store.truncate(2)
        assert store.verify() == []
    reader = RunStore.open(tmp_path / "run")
    left = reader.diagonal(0, 2)
    assert left is not None
    assert torch.equal(left, expected[:2].float())


def test_a_run_without_a_diagonal_has_none(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 3) as store:
        assert store.diagonal(0, 3) is None


def test_sizes_and_drifts_come_back_and_the_diagonal_is_not_exported(tmp_path: Path) -> None:
    with diagonal_run(tmp_path / "run", 5) as store:
        steps = store.steps(1, 4)
        assert steps.size.tolist() == [2.5, 5.0, 7.5]
        assert steps.drift.tolist() == [0.125, 0.25, 0.375]
        exported = store.scalars("steps").read_all()
    assert not [name for name in exported.column_names if name.startswith("P")]
    assert exported["drift"].to_pylist() == [0.125 * t for t in range(5)]
    assert exported["rate_1"].to_pylist() == [record(t).groups["rate"][1] for t in range(5)]
