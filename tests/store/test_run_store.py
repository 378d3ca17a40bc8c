"""A run's steps and rows, and what lies beside them: appended, read, torn, resumed."""

import gc
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import torch
from tests.store.builders import (
    LAYERS,
    diagonal_run,
    new_run,
    python,
    record,
    records,
    rows_of,
    split_record,
    split_run,
)
from tests.support.oracles import assert_close

from backstory.errors import DiskError, StoreError, UsageError
from backstory.maths.encoding import DTYPES
from backstory.store import RunStore, StepRecord, codec, run_store


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def fill(store: RunStore) -> None:
    for t in range(store.n_steps(), 100):
        store.append([record(t, size=500)])


def all_rows(store: RunStore) -> torch.Tensor:
    rows = store.read(0, store.n_rows(), dtype=torch.float64).rows
    assert rows is not None
    return rows


def test_a_run_goes_on_after_it_is_reopened(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 3).close()
    with RunStore.open(tmp_path / "run", write=True) as store:
        assert (store.n_steps(), store.messages) == (3, [])
        store.append(records(3, 5))
        store.append([])
        with pytest.raises(StoreError, match="expected step 5 next, got step 6"):
            store.append(records(6, 7))
        with pytest.raises(StoreError, match="expected step 6"):
            store.append([record(5), record(7)])
    reader = RunStore.open(tmp_path / "run")
    assert torch.equal(all_rows(reader), rows_of(0, 5))
    assert reader.verify() == []
    for ask in (lambda: reader.read(0, 10), lambda: reader.read(-1, 2), lambda: reader.steps(3, 2)):
        with pytest.raises(UsageError, match="are out of range"):
            ask()


def test_rows_without_their_step_are_ignored_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = new_run(tmp_path / "run", 3)

    with monkeypatch.context() as patch:
        patch.setattr(store._steps, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.append(records(3, 6))
    assert RunStore.open(tmp_path / "run").n_rows() == 6
    store.close(compact=False)
    reader = RunStore.open(tmp_path / "run")
    assert (reader.n_steps(), reader.n_rows(), reader._rows.count()) == (3, 6, 12)
    assert reader.scalars("rows").read_all().num_rows == 6
    assert reader.verify() == []
    with RunStore.open(tmp_path / "run", write=True) as store:
        store.append(records(3, 4))
        assert torch.equal(all_rows(store), rows_of(0, 4))
        assert store.verify() == []


def test_a_failed_commit_can_be_tried_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_run(tmp_path / "run", 2) as store:
        with monkeypatch.context() as patch:
            patch.setattr(store._steps, "append", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.append(records(2, 4))
        other = record(2, size=5)  # not the rows of the first try, so that those would be seen
        store.append([other])
        assert torch.equal(all_rows(store), torch.cat([rows_of(0, 2), other.rows]))
        assert store.verify() == []


@pytest.mark.parametrize("table", ["rows", "steps"])
def test_a_damaged_manifest_costs_its_last_commit_only(tmp_path: Path, table: str) -> None:
    store = new_run(tmp_path / "run", 3)
    store.append(records(3, 5))
    store.close(compact=False)
    bad = min((tmp_path / f"run/{table}.lance/_versions").glob("*.manifest"))
    bad.write_bytes(b"")
    reader = RunStore.open(tmp_path / "run")
    assert (reader.n_steps(), len(reader.messages)) == (3, 1)
    with RunStore.open(tmp_path / "run", write=True) as store:
        assert f"the latest manifest of {table}.lance" in store.messages[0]
        assert store.n_steps() == 3
        store.append(records(3, 6))
        assert store.verify() == []
    assert RunStore.open(tmp_path / "run").messages == []


def test_backward_gives_whole_steps_latest_first(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 8) as store:
        got = list(store.chunks(7, dtype=torch.float64, chunk_bytes=5 * 12 * 8, lo_step=1, samples=True))
    assert [b.step.tolist() for b in got] == [[5, 5, 5, 6], [3, 4, 4], [1, 1, 2, 2, 2]]
    assert [b.row_start for b in got] == [9, 6, 1]
    rows = torch.cat([b.rows for b in reversed(got) if b.rows is not None])
    assert torch.equal(rows, rows_of(1, 7))
    assert [s for b in reversed(got) for s in b.samples or []] == [s for r in records(1, 7) for s in r.samples]


def test_backward_takes_a_multiple_of_rows_where_there_is_room(tmp_path: Path) -> None:
    """Steps of 1, 2, 3, 1 … rows; room for 5 rows is cut to 4, and room for fewer than a multiple is left as it is."""
    with new_run(tmp_path / "run", 8) as store:
        fours = list(store.chunks(7, dtype=torch.float64, chunk_bytes=5 * 12 * 8, lo_step=1, multiple=2))
        fives = list(store.chunks(7, dtype=torch.float64, chunk_bytes=5 * 12 * 8, lo_step=1, multiple=9))
    assert [b.step.tolist() for b in fours] == [[5, 5, 5, 6], [3, 4, 4], [2, 2, 2], [1, 1]]
    assert [b.step.tolist() for b in fives] == [[5, 5, 5, 6], [3, 4, 4], [1, 1, 2, 2, 2]]


def test_backward_yields_a_step_larger_than_the_chunk_whole(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 4) as store:
        got = list(store.chunks(4, dtype=torch.float32, chunk_bytes=1))
    assert [b.step.tolist() for b in got] == [[3], [2, 2, 2], [1, 1], [0]]


@pytest.mark.parametrize("curvature", [False, True])
def test_backward_counts_the_curvature_rows_that_a_split_run_has_to_read(tmp_path: Path, curvature: bool) -> None:
    """Five rows of 1 + 3 vectors each, whether the three are given out or only summed."""
    with split_run(tmp_path / "run", 8) as store:
        got = list(store.chunks(7, dtype=torch.float64, chunk_bytes=5 * 4 * 12 * 8, lo_step=1, curvature=curvature))
    assert [b.step.tolist() for b in got] == [[5, 5, 5, 6], [3, 4, 4], [1, 1, 2, 2, 2]]
    rows = torch.cat([b.rows for b in reversed(got) if b.rows is not None])
    assert_close(rows, torch.cat([split_record(t).rows for t in range(1, 7)]), 1e-14)


@pytest.mark.parametrize("encoding", DTYPES)
def test_bytes_per_row_are_those_of_its_columns(tmp_path: Path, encoding: str) -> None:
    """Gradient alone; with three curvature rows and their κ and products; and split, without the gradient."""
    made = {"layers": LAYERS, "encoding": encoding, "n_groups": 1, "config": {}}
    vector = sum(x.nbytes for x in codec.encoded(torch.ones(1, 12), [5, 7], encoding))
    for rows, split, expected in ((0, False, vector), (3, False, 4 * vector + 3 * 16), (3, True, 3 * vector + 3 * 16)):
        with RunStore.create(tmp_path / f"{rows}{split}", **made, curvature_rows=rows, split=split) as store:  # type: ignore[arg-type]
            assert store.bytes_per_row == expected + 48
            fields = [field.type for field in store._rows.schema if pa.types.is_fixed_size_list(field.type)]
            assert sum(kind.list_size * kind.value_type.bit_width // 8 for kind in fields) == expected


def test_backward_holds_a_chunk_not_the_run(tmp_path: Path) -> None:
    width, n, B = 4096, 60, 64  # 1 MB a step in float32
    store = RunStore.create(tmp_path / "run", layers=[("l", width)], encoding="float16", n_groups=1, config={})
    for t in range(0, n, 10):
        store.append([record(s, width=width, size=B, n_groups=1) for s in range(t, t + 10)])
    process = psutil.Process()
    for _ in store.chunks(8, dtype=torch.float32, chunk_bytes=4 << 20):
        pass
    gc.collect()
    before, most, rows = process.memory_info().rss, 0, 0
    for block in store.chunks(n, dtype=torch.float32, chunk_bytes=4 << 20):
        rows += len(block.step)
        most = max(most, process.memory_info().rss - before)
        del block
    store.close()
    assert rows == n * B
    assert most < 32 << 20, f"reading backward in chunks of 4 MB took {most >> 20} MB more, of {n} MB in all"


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 2) as store:
        reader = RunStore.open(tmp_path / "run")
        store.append(records(2, 5))
        assert (reader.n_steps(), reader.n_rows()) == (5, 9)
        store._tidy()
        store.append(records(5, 6))
        assert torch.equal(all_rows(reader), rows_of(0, 6))


def test_long_recording_stays_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "TIDY_EVERY", 10)
    with new_run(tmp_path / "run") as store:
        for t in range(25):
            store.append(records(t, t + 1))
        assert len(list((tmp_path / "run/rows.lance/_versions").glob("*.manifest"))) < 10
        assert torch.equal(all_rows(store), rows_of(0, 25))
    assert len(list((tmp_path / "run/rows.lance/data").iterdir())) < 10


def test_closing_twice_and_without_compaction(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 2)
    store.close(compact=False)
    store.close()
    assert RunStore.open(tmp_path / "run").verify() == []


FULL = """
import resource
from backstory.errors import DiskError
from backstory.store import RunStore
from tests.store.builders import record
store = RunStore.open(sys.argv[1], write=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    store.append([record(t, size=5000) for t in range(2, 4)])
except DiskError as error:
    print(error)
store.append([record(2)])
store.close()
"""


def test_a_file_that_cannot_grow_keeps_what_was_committed(tmp_path: Path) -> None:
    new_run(tmp_path / "run", 2).close()
    out, error = python(FULL, tmp_path / "run").communicate(timeout=60)
    assert "steps before 2 are saved, steps 2 to 3 are not. Free some space" in out, error
    with RunStore.open(tmp_path / "run", write=True) as store:
        assert store.n_steps() == 3
        assert store.verify() == []
        assert torch.equal(all_rows(store), rows_of(0, 3))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_keeps_what_was_committed(small_disk: Path) -> None:
    with new_run(small_disk / "run", 2) as store:
        with pytest.raises(DiskError, match=r"are saved.*resume the run"):
            fill(store)
        n = store.n_steps()
        with pytest.raises(DiskError):
            store.save_tensors("large", {"x": torch.zeros(1 << 20)})
        assert 2 < n < 100
        assert store.tensor_names() == []
    assert RunStore.open(small_disk / "run").verify() == []
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    with RunStore.open(small_disk / "run", write=True) as store:
        assert store.n_steps() == n
        store.append([record(n, size=500), record(n + 1)])
        assert store.verify() == []


APPENDING = """
import torch
from backstory.store import RunStore, run_store
from tests.store.builders import records
run_store.TIDY_EVERY = 7
store = RunStore.open(sys.argv[1], write=True)
print("ready", flush=True)
n = store.n_steps()
while True:
    if n > 60:
        n = 30
        store.truncate(n)
    store.append(records(n, n + 3))
    n += 3
    print(n, flush=True)
"""


def kill_while_appending(path: Path, kills: int) -> None:
    dice = random.Random(kills)
    new_run(path).close()
    for _ in range(kills):
        process = python(APPENDING, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        first = (
            process.stdout.readline()
        )  # a step is committed: however busy the machine is, there is something to tear
        time.sleep(dice.uniform(0.02, 0.5))
        process.kill()
        out, error = process.communicate()
        said = [int(line) for line in (first + out).split()]
        store = RunStore.open(path)
        n = store.n_steps()
        assert store.verify() == [], error
        assert torch.equal(all_rows(store), rows_of(0, n))
        assert not said or n >= min(said[-1], 30), f"{said[-1]} steps were committed, {n} are there"


def test_kill_9_tears_no_committed_step(tmp_path: Path) -> None:
    kill_while_appending(tmp_path / "run", 1)


@pytest.mark.slow
def test_many_kill_9_tear_no_committed_step(tmp_path: Path) -> None:
    kill_while_appending(tmp_path / "run", 15)


def test_a_layout_is_settled_anew_before_the_first_row_only(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", encoding="int8") as store:
        store.relayout([2, 10], seed=4)
        assert store.dims == [2, 10]
        store.append(records(0, 3))
        before = (tmp_path / "run" / "config.json").read_bytes()
        with pytest.raises(StoreError, match=r"fixed once it has steps: .* got 12 in .* with 3 steps recorded"):
            store.relayout([3, 9])
        assert store.dims == [2, 10]
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    reader = RunStore.open(tmp_path / "run")
    assert reader.config["layers"] == [
        {"name": "first", "offset": 0, "dims": 2},
        {"name": "second", "offset": 2, "dims": 10},
    ]
    assert reader.config["seed"] == 4
    assert reader.verify() == []
    actual, true = all_rows(reader), rows_of(0, 3)
    for part in (slice(0, 2), slice(2, 12)):
        step = true[:, part].abs().amax(1, keepdim=True) / 127
        assert bool(((actual - true)[:, part].abs() <= 0.5001 * step).all()), (
            "one scale for each layer of the new layout"
        )


@pytest.mark.parametrize("dims", [[5, 8], [12, 1], [12], [4, 4, 4], [4], [1, 2, 3], []])
def test_a_wider_layout_or_one_of_another_number_is_refused(dims: list[int], tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        before = (tmp_path / "run" / "config.json").read_bytes()
        with pytest.raises(
            StoreError, match=rf"keep at most 12 coordinates in 2 layers, got {sum(dims)} in {len(dims)}"
        ):
            store.relayout(dims)
        assert (store.dims, (tmp_path / "run" / "config.json").read_bytes()) == ([5, 7], before)


def test_a_reader_cannot_settle_a_layout(tmp_path: Path) -> None:
    new_run(tmp_path / "run").close()
    with pytest.raises(UsageError, match="open read-only"):
        RunStore.open(tmp_path / "run").relayout([2, 10])


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_layout_that_could_not_be_written_leaves_the_old_one(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_run(tmp_path / "run") as store:
        before = (tmp_path / "run" / "config.json").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, function, interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.relayout([2, 10], seed=4)
        assert (store.dims, store.config["seed"]) == ([5, 7], 3)
        assert (tmp_path / "run" / "config.json").read_bytes() == before
        store.append(records(0, 2))
    assert torch.equal(all_rows(RunStore.open(tmp_path / "run")), rows_of(0, 2))


def test_a_reader_sees_a_layout_that_was_settled_after_it_was_opened(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", encoding="int8") as store:
        reader = RunStore.open(tmp_path / "run")
        assert (reader.n_steps(), reader.dims) == (0, [5, 7])
        store.relayout([2, 10])
        store.append(records(0, 3))
        assert reader.n_steps() == 3
        assert reader.dims == [2, 10]
        assert torch.equal(all_rows(reader), all_rows(store))


def narrow(step: int) -> StepRecord:
    plain = record(step)
    return replace(plain, rows=plain.rows[:, :4])


@pytest.mark.parametrize("encoding", ["float64", "int8"])
def test_a_layout_may_become_narrower_before_the_first_row(encoding: str, tmp_path: Path) -> None:
    with new_run(tmp_path / "run", encoding=encoding) as store:
        reader, cost = RunStore.open(tmp_path / "run"), store.bytes_per_row
        assert reader.n_steps() == 0
        store.relayout([1, 3], seed=4)
        assert (store.dims, store.config["seed"]) == ([1, 3], 4)
        assert cost - store.bytes_per_row == 8 * (8 if encoding == "float64" else 1)
        store.append([narrow(0), narrow(1)])
        with pytest.raises(StoreError, match=r"got 2 in .* with 2 steps recorded"):
            store.relayout([1, 1])
        assert (reader.n_steps(), reader.dims) == (2, [1, 3])
        assert torch.equal(all_rows(reader), all_rows(store))
    fresh = RunStore.open(tmp_path / "run")
    assert fresh.verify() == []
    true = torch.cat([narrow(t).rows for t in range(2)])
    assert float((all_rows(fresh) - true).abs().max()) <= (
        0 if encoding == "float64" else 0.02 * float(true.abs().max())
    )


def test_a_diagonal_is_as_wide_as_it_began(tmp_path: Path) -> None:
    with diagonal_run(tmp_path / "run") as store:
        for dims in ([1, 3], [5, 6]):
            with pytest.raises(StoreError, match=rf"in 2 layers, got {sum(dims)} in 2"):
                store.relayout(dims)
        store.relayout([7, 5])
        assert store.dims == [7, 5]


def test_a_death_between_the_narrower_table_and_the_config_can_be_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("backstory.store.files.write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.relayout([1, 3])
    store.close(compact=False)
    with RunStore.open(tmp_path / "run", write=True) as store:
        assert (store.dims, store.n_steps()) == ([5, 7], 0)
        store.relayout([1, 3])
        store.append([narrow(0)])
        assert torch.equal(all_rows(store), narrow(0).rows)
        assert store.verify() == []


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
    with pytest.raises(StoreError, match="It has: basis, checkpoint-000100"):
        reader.load_tensors("bases")
    with pytest.raises(UsageError, match="is not a valid file name"):
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
            store.spool.put(step, {"x": torch.zeros(1)}, {})
        store.truncate(3)
        assert (store.n_steps(), store.n_rows(), store.spool.steps()) == (3, 6, [2])
        assert store.tensor_names() == ["basis", "checkpoint-000003", "scale-00000003", "scale-map"]
        store.append(records(3, 8))
        assert store.verify() == []
        rows = store.read(0, store.n_rows(), dtype=torch.float64).rows
        assert rows is not None
        assert torch.equal(rows, rows_of(0, 8))
        with pytest.raises(UsageError, match="number of steps in the run, got 9"):
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
        lambda: reader.spool.put(0, {}, {}),
        lambda: reader.spool.clear(),
        lambda: reader.write_embeddings(0, [], {}),
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
        actual = [x.read_embeddings(3, 0, len(E), dtype=torch.float64) for x in (store, reader, fresh)]
    for x in actual:
        for part in (slice(0, 2), slice(2, 12)):
            step = E[:, part].abs().amax(1, keepdim=True) / 127
            assert bool(((x - E)[:, part].abs() <= 0.5001 * step).all())
