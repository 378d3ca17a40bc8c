"""Windows on disk: their mean by hand, deaths at every operation, full disks, damage, and runs that are cut and go on."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.builders import LAYERS, WIDTH, record
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.errors import DiskError, StoreError, UsageError
from backstory.maths.windows import Grid
from backstory.store import RunStore, StepRecord, files, tables
from backstory.store.windows import Window, Windows

GRID = Grid(first=4, growing=False, seen=2, rank=WIDTH)  # windows of 4 steps, of which the first and the third are seen
Span = tuple[int, int]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is flushed: what a machine that loses its power keeps is not asked here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class Death(BaseException):
    """The process ends here."""


def dies(*args: object) -> None:
    raise Death


def is_seen(t: int) -> bool:
    return t % 2 == 0


def is_clipped(t: int) -> bool:
    return t % 3 != 0


def shared_rows(t: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(300 + t), dtype=torch.float64)


def dual(t: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(400 + t), dtype=torch.float64)


def step(t: int) -> StepRecord:
    return replace(
        record(t),
        clip=0.5 if is_clipped(t) else 1.0,
        shared=shared_rows(t) if is_seen(t) else None,
        dual=dual(t) if is_clipped(t) else None,
    )


def steps(lo: int, hi: int) -> list[StepRecord]:
    return [step(t) for t in range(lo, hi)]


def new_run(path: Path, *commits: int, encoding: str = "float64", grid: Grid = GRID) -> RunStore:
    """A run with windows, committed up to each of `commits` in turn."""
    store = RunStore.create(path, layers=LAYERS, encoding=encoding, n_groups=2, config={}, windows=True)
    store.keep_windows(grid)
    return go_on(store, *commits)


def go_on(store: RunStore, *commits: int) -> RunStore:
    for end in commits:
        store.append(steps(store.n_steps(), end))
    return store


def mean(lo: int, hi: int) -> Tensor:
    """The mean of Σ v vᵀ over the seen steps, by hand."""
    seen = [shared_rows(t) for t in range(lo, hi) if is_seen(t)]
    return sum((v.T @ v for v in seen), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)) / max(1, len(seen))


def duals(lo: int, hi: int) -> Tensor:
    return torch.cat([torch.zeros(0, WIDTH).double(), *(dual(t)[None] for t in range(lo, hi) if is_clipped(t))])


def check(store: RunStore, span: Span, of: Span | None = None, rtol: float = 1e-12) -> None:
    """The window is the mean of the steps `of` (its own), with d of its own clipped steps."""
    V, d = store.windows.read(span, torch.float64)
    assert_close(V.T @ V, mean(*(of or span)), rtol)
    products = V @ V.T
    assert_close(products, products.diag().diag(), max(rtol, 1e-11))
    wanted = duals(*span)
    if len(wanted):
        assert d is not None
        assert_close(d, wanted, rtol)
    else:
        assert d is None or len(d) == 0


def windows_of(store: RunStore) -> dict[Span, Window]:
    return {span: store.windows.read(span, torch.float64) for span in store.windows.spans(store.n_steps())}


def same_windows(a: RunStore, b: RunStore) -> None:
    """Bit for bit."""
    one, two = windows_of(a), windows_of(b)
    assert list(one) == list(two)
    for span in one:
        (V, d), (W, e) = one[span], two[span]
        assert torch.equal(V, W), span
        assert (d is None) == (e is None), span
        assert d is None or e is None or torch.equal(d, e), span


def let_go(store: RunStore) -> None:
    """What a death does to the lock."""
    assert store._lock is not None
    store._lock.release()


def waiting(path: Path) -> list[str]:
    return sorted(x.name for x in (path / "window").iterdir())


# closed and open windows


@pytest.mark.parametrize("commits", [(14,), tuple(range(1, 15)), (3, 5, 13, 14), (4, 8, 12, 14)], ids=str)
def test_a_window_is_the_mean_of_its_seen_steps(commits: tuple[int, ...], tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", *commits)
    assert store.windows.spans(14) == [(0, 4), (4, 8), (8, 12), (12, 14)]
    assert sorted(x.name for x in store.path.glob("curvature-*")) == [
        f"curvature-{lo:08d}-{lo + 4:08d}.safetensors" for lo in (0, 4, 8)
    ]
    for span in store.windows.spans(14):
        check(store, span)
    assert store.verify() == []


def test_how_steps_were_committed_changes_no_bit(tmp_path: Path) -> None:
    same_windows(new_run(tmp_path / "one", *range(1, 15)), new_run(tmp_path / "two", 3, 9, 14))


@pytest.mark.parametrize(("encoding", "rtol"), [("float32", 1e-6), ("float16", 2e-3), ("int8", 0.03)])
def test_encoded_windows_are_near(encoding: str, rtol: float, tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 6, 9, encoding=encoding)
    for span in store.windows.spans(9):
        V, d = store.windows.read(span, torch.float64)
        assert_close((V.T @ V).reshape(1, -1), mean(*span).reshape(1, -1), rtol)
        assert d is None if span == (8, 9) and not is_clipped(8) else d is not None
        if d is not None:
            assert_close(d.reshape(1, -1), duals(*span).reshape(1, -1), rtol)


def test_the_rank_bounds_what_is_kept(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 5, grid=GRID._replace(rank=3))
    for span in ((0, 4), (4, 5)):
        V, values = store.windows.read(span, torch.float64).V, torch.linalg.eigvalsh(mean(*span)).flip(0)
        assert_close(V.square().sum(1), values[:3], 1e-10)


def test_the_rows_of_an_open_window_are_orthogonal_too(tmp_path: Path) -> None:
    """They are made of some coordinates only, where there are many rows."""
    store = new_run(tmp_path / "run", 19, grid=Grid(40, False, 20, 2))
    V, _ = store.windows.read((0, 19), torch.float64)
    products = V @ V.T
    assert len(V) == 2
    assert_close(products, products.diag().diag(), 1e-11)


def test_the_last_window_is_closed_as_it_is_at_the_end(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 6)
    store.windows.settle(6, end=True)
    assert (store.path / "curvature-00000004-00000006.safetensors").exists()
    assert store.windows.spans(6) == [(0, 4), (4, 6)]
    check(store, (4, 6))


def test_what_waits_is_dropped_one_window_later(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 3, 5)
    assert waiting(store.path) == ["rows-00000000-00000003.safetensors", "rows-00000003-00000005.safetensors"]
    go_on(store, 8)
    assert waiting(store.path) == ["rows-00000003-00000005.safetensors", "rows-00000005-00000008.safetensors"]
    go_on(store, 12)
    assert waiting(store.path) == ["rows-00000008-00000012.safetensors"]


def test_windows_that_grow(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 5, 15, 17, grid=Grid(1, True, 1, WIDTH))
    spans = [(t, t + 1) for t in range(12)] + [(12, 14), (14, 16), (16, 17)]
    assert store.windows.spans(17) == spans
    V = store.windows.read((14, 16), torch.float64).V
    assert_close(V.T @ V, mean(14, 15), 1e-12)


def test_a_window_without_seen_steps_has_no_rows(tmp_path: Path) -> None:
    """Where a run was cut between seen steps, and what waited is gone."""
    store = new_run(tmp_path / "run", *range(1, 15))
    store.truncate(3)
    go_on(store, 6)
    assert store.windows.spans(6) == [(0, 3), (3, 4), (4, 6)]
    assert store.windows.read((3, 4), torch.float64).V.shape == (0, WIDTH)
    assert store.verify() == []


def test_a_reader_sees_the_open_window_while_others_record(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 3) as store:
        reader = RunStore.open(store.path)
        assert reader.windows.spans(3) == [(0, 3)]
        check(reader, (0, 3))
        go_on(store, 4, 5, 7)
        assert reader.windows.spans(reader.n_steps()) == [(0, 4), (4, 7)]
        check(reader, (0, 4))
        check(reader, (4, 7))
        assert reader.verify() == []
        with pytest.raises(UsageError, match="read-only"):
            reader.windows.settle(7)
        with pytest.raises(UsageError, match="read-only"):
            reader.windows.spool(steps(7, 8))
        with pytest.raises(UsageError, match="read-only"):
            reader.windows.truncate(3, lambda lo, hi: 0)
        with pytest.raises(UsageError, match="read-only"):
            reader.windows.write((4, 7), Window(torch.zeros(1, WIDTH), None))


def test_a_run_without_windows_has_no_such_files(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", layers=LAYERS, encoding="float64", n_groups=2, config={})
    store.append(steps(0, 5))
    store.windows.settle(5, end=True)
    assert store.windows.spans(5) == []
    assert not (store.path / "window").exists()
    with pytest.raises(StoreError, match="steps 0 to 3 is missing"):
        store.windows.read((0, 4), torch.float64)


# deaths


@contextmanager
def dying_at(k: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The k-th operation on files raises instead of being done; yields how many there were."""
    count = [0]

    def patched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == k:
                raise Death(name)
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for owner, name in (
            (os, "replace"),
            (Path, "unlink"),
            (tables.Table, "append"),
            (tables.Table, "delete"),
        ):
            patched(owner, name)
        yield count


def died(work: Callable[[RunStore], object], path: Path, k: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether `work` on the run died at its k-th operation."""
    store = RunStore.open(path, write=True)
    try:
        with dying_at(k, monkeypatch):
            work(store)
    except Death:
        return True
    finally:
        let_go(store)
    return False


def at_each_operation(
    base: Path, work: Callable[[RunStore], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Copies of a run on which `work` died, one for each of its operations."""
    k = 1
    while died(work, shutil.copytree(base, tmp_path / f"copy-{k}"), k, monkeypatch):
        yield tmp_path / f"copy-{k}"
        shutil.rmtree(tmp_path / f"copy-{k}")
        k += 1
    assert k > 3, "there are no operations to die at"


def finish(store: RunStore, *commits: int) -> None:
    go_on(store, *(end for end in commits if end > store.n_steps()))
    store.windows.settle(store.n_steps(), end=True)


def test_a_death_while_steps_are_added_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is closed, what waited for the one before is dropped, and at the end the last is closed as it is."""
    let_go(new_run(tmp_path / "base", 3, 7))
    whole = new_run(tmp_path / "whole", 3, 7)
    finish(whole, 9, 14)
    for path in at_each_operation(tmp_path / "base", lambda s: finish(s, 9, 14), tmp_path, monkeypatch):
        store = RunStore.open(path, write=True)
        assert store.verify() == []
        finish(store, 8, 11, 14)
        same_windows(store, whole)
        assert store.verify() == []
        let_go(store)


@pytest.mark.parametrize("to", [13, 12, 10, 8, 6, 3])
def test_a_death_while_steps_are_dropped_changes_nothing(
    to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut in the open window, at its beginning, in the last closed one, at its beginning, and further back."""
    let_go(new_run(tmp_path / "base", 3, 7, 9, 14))
    whole = new_run(tmp_path / "whole", 3, 7, 9, 14)
    whole.truncate(to)
    finish(whole, 14)
    for path in at_each_operation(tmp_path / "base", lambda s: s.truncate(to), tmp_path, monkeypatch):
        store = RunStore.open(path, write=True)
        assert store.verify() == []
        assert store.n_steps() in (14, to)
        store.truncate(to)
        assert store.verify() == []
        finish(store, 11, 14)
        same_windows(store, whole)
        let_go(store)


def test_a_death_in_a_run_that_is_opened_again_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repair itself dies: steps that are not committed wait in a file of their own."""
    store = new_run(tmp_path / "base", 3, 7, 9)
    with monkeypatch.context() as patch:
        patch.setattr(tables.Table, "append", dies)
        with pytest.raises(Death):
            store.append(steps(9, 13))
    let_go(store)
    assert waiting(store.path)[-1] == "rows-00000009-00000013.safetensors"
    whole = new_run(tmp_path / "whole", 13)
    k = 1
    while True:
        path = shutil.copytree(store.path, tmp_path / f"copy-{k}")
        try:
            with dying_at(k, monkeypatch):
                RunStore.open(path, write=True).close()
            break
        except Death:
            k += 1
        again = go_on(RunStore.open(path, write=True), 10, 13)
        same_windows(again, whole)
        let_go(again)
    assert k > 1


def test_a_reader_of_a_run_that_died_while_steps_were_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has opened it for writing since, so nothing is repaired: what is read is the run as it is committed."""
    let_go(new_run(tmp_path / "base", 9, 12))
    for path in at_each_operation(tmp_path / "base", lambda s: s.truncate(11), tmp_path, monkeypatch):
        reader = RunStore.open(path)
        for span in reader.windows.spans(reader.n_steps()):
            V, d = reader.windows.read(span, torch.float64)
            expected = duals(*span)
            assert_close(
                V.T @ V, mean(span[0], 12 if span[0] == 8 and reader.windows._closed().get(8) else span[1]), 1e-12
            )
            assert d is not None
            assert_close(d[: len(expected)], expected, 1e-12)


# full disks


def full_for(prefix: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    real = files.write_tensors

    def write(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name.startswith(prefix):
            raise DiskError(f"the disk is full: {path}")
        real(path, *args, **kwargs)

    monkeypatch.setattr(files, "write_tensors", write)
    return monkeypatch


def test_a_window_that_found_no_room_is_closed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, store = new_run(tmp_path / "whole", 13), new_run(tmp_path / "run", 3)
    with monkeypatch.context() as patch:
        full_for("curvature-", patch)
        go_on(store, 6, 9)
        assert store.n_steps() == 9
        assert not list(store.path.glob("curvature-*"))
        for span in store.windows.spans(9):
            check(store, span)
        assert store.verify() == []
        with pytest.raises(DiskError):
            store.windows.settle(9, end=True)
    go_on(store, 10)
    assert [x.name[10:18] for x in sorted(store.path.glob("curvature-*"))] == ["00000000", "00000004"]
    go_on(store, 13)
    same_windows(store, whole)


def test_a_window_that_found_no_room_is_closed_once_the_run_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, store = new_run(tmp_path / "whole", 11), new_run(tmp_path / "run", 3)
    with monkeypatch.context() as patch:
        go_on(full_for("curvature-", patch) and store, 9)
    let_go(store)
    again = RunStore.open(store.path, write=True)
    again.truncate(7)
    go_on(again, 11)
    same_windows(again, whole)


def test_steps_whose_rows_found_no_room_are_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, store = new_run(tmp_path / "whole", 9), new_run(tmp_path / "run", 3)
    with monkeypatch.context() as patch, pytest.raises(DiskError, match="steps 3 to 8 are not"):
        go_on(full_for("rows-", patch) and store, 9)
    assert store.n_steps() == 3
    check(store, (0, 3))
    go_on(store, 5, 9)
    same_windows(store, whole)


def test_rows_of_an_attempt_that_failed_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows waited already when the table found no room, and then fewer steps are tried."""
    whole, store = new_run(tmp_path / "whole", 9), new_run(tmp_path / "run", 3)

    def full(*args: Any) -> None:
        raise DiskError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(DiskError):
        patch.setattr(tables.Table, "append", full)
        go_on(store, 8)
    assert waiting(store.path)[-1] == "rows-00000003-00000008.safetensors"
    go_on(store, 5)
    assert waiting(store.path)[-1] == "rows-00000003-00000005.safetensors"
    go_on(store, 9)
    same_windows(store, whole)


# damage


def flip(path: Path) -> None:
    """Change one bit of the last number."""
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "span"),
    [
        ("curvature-00000004-00000008", (4, 8)),
        ("window/rows-00000008-00000010", (8, 10)),
        ("curvature-00000000-00000004", (0, 4)),
    ],
)
def test_a_flipped_bit_is_found(file: str, span: Span, tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 8, 10)
    flip(store.path / f"{file}.safetensors")
    (sentence,) = store.verify()
    assert f"{file.split('/')[-1]}.safetensors has changed since it was written" in sentence
    with pytest.raises(StoreError, match=r"has changed since|is damaged\. Restore it"):
        store.windows.read(span, torch.float64)


@pytest.mark.parametrize(
    ("file", "first", "last"),
    [
        ("curvature-00000000-00000004", 0, 3),
        ("curvature-00000004-00000008", 4, 7),
        ("window/rows-00000008-00000010", 8, 9),
    ],
)
def test_a_missing_file_is_found(file: str, first: int, last: int, tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 8, 10)
    for name in (file, "window/rows-00000000-00000008"):  # it holds the closed windows too
        (store.path / f"{name}.safetensors").unlink()
    assert any(f"the curvature of steps {first} to " in sentence for sentence in store.verify())
    with pytest.raises(StoreError, match=f"steps {first} to {last} is missing"):
        store.windows.read((first, last + 1), torch.float64)


@pytest.mark.parametrize("file", ["curvature-00000004-00000008", "window/rows-00000008-00000010"])
def test_half_a_file_is_found(file: str, tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 8, 10)
    path = store.path / f"{file}.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    assert any("damaged" in sentence for sentence in store.verify())


# going on


@pytest.mark.parametrize("to", [14, 13, 12, 11, 9, 8])
@pytest.mark.parametrize("commits", [(14,), (3, 7, 9, 14), tuple(range(1, 15))], ids=["at once", "some", "each"])
def test_cut_within_the_last_two_windows_it_goes_on_as_if_undisturbed(
    to: int, commits: tuple[int, ...], tmp_path: Path
) -> None:
    whole, store = new_run(tmp_path / "whole", 18), new_run(tmp_path / "run", *commits)
    store.truncate(to)
    assert store.verify() == []
    if to % 4:
        check(store, (to // 4 * 4, to))
    go_on(store, to + 1, 15, 18) if to < 14 else go_on(store, 18)
    same_windows(store, whole)


@pytest.mark.parametrize("to", [7, 6, 5, 2])
def test_cut_further_back_a_window_keeps_what_all_its_steps_gave(to: int, tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", *range(1, 15))
    lo = to // 4 * 4
    before = store.windows.read((lo, lo + 4), torch.float64)
    store.truncate(to)
    after = store.windows.read((lo, to), torch.float64)
    assert_close(after.V.T @ after.V, before.V.T @ before.V, 1e-12)
    check(store, (lo, to), of=(lo, lo + 4))
    go_on(store, 9)
    spans = [(lo, to), (to, lo + 4), *([(4, 8)] if to < 4 else []), (8, 9)]
    assert store.windows.spans(9)[-len(spans) :] == spans
    for span in spans[1:]:
        if any(map(is_seen, range(*span))):
            check(store, span)
    assert store.verify() == []


def test_a_window_is_cut_twice(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", *range(1, 15))
    for to in (7, 6):
        store.truncate(to)
        check(store, (4, to), of=(4, 8))
    store.truncate(5)
    assert store.windows.spans(5) == [(0, 4), (4, 5)]
    check(store, (4, 5), of=(4, 8))


def test_all_steps_are_dropped(tmp_path: Path) -> None:
    whole, store = new_run(tmp_path / "whole", 9), new_run(tmp_path / "run", 5, 14)
    store.truncate(0)
    assert store.windows.spans(0) == []
    assert waiting(store.path) == []
    assert not list(store.path.glob("curvature-*"))
    assert store.verify() == []
    go_on(store, 9)
    same_windows(store, whole)


def test_a_run_that_ended_keeps_its_last_window_as_it_was(tmp_path: Path) -> None:
    """What waited is dropped at the end; a run that goes on begins a window of its own there, cut or not."""
    store = new_run(tmp_path / "run", 3, 6)
    store.windows.settle(6, end=True)
    assert waiting(store.path) == []
    let_go(store)
    store = RunStore.open(store.path, write=True)
    store.truncate(6)
    go_on(store, 7)
    store.windows.settle(7, end=True)
    store.truncate(7)
    go_on(store, 9)
    assert store.windows.spans(9) == [(0, 4), (4, 6), (6, 7), (7, 8), (8, 9)]
    for span in ((0, 4), (4, 6), (6, 7), (8, 9)):
        check(store, span)
    store.truncate(5)
    check(store, (4, 5), of=(4, 6))
    assert store.verify() == []


def test_a_run_that_ended_with_its_window_stays_as_it_is(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 8)
    store.windows.settle(8, end=True)
    store.truncate(8)
    assert store.windows._closed() == {0: 4, 4: 8}


def test_opening_for_writing_drops_what_was_not_committed(tmp_path: Path) -> None:
    store = new_run(tmp_path / "run", 6)
    store.windows.spool(steps(6, 11))
    let_go(store)
    with RunStore.open(store.path, write=True) as again:
        assert waiting(again.path) == ["rows-00000000-00000006.safetensors"]
        check(again, (4, 6))


def test_windows_are_found_by_their_steps_alone(tmp_path: Path) -> None:
    """Files of other names in the folder are nobody's windows."""
    store = new_run(tmp_path / "run", 5)
    for name in ("curvature-old.safetensors", "curvature-00000004-00000008.safetensors.tmp"):
        (store.path / name).write_bytes(b"")
    (store.path / "window" / "rows-00000004-00000008.safetensors.tmp").write_bytes(b"")
    assert isinstance(store.windows, Windows)
    assert store.windows.spans(5) == [(0, 4), (4, 5)]
    check(store, (4, 5))
