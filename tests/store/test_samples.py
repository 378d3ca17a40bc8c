"""Samples that a person can look at, and forget."""

from pathlib import Path

import pytest
from tests.store.builders import new_run

from backstory.errors import UsageError
from backstory.store import RunStore


def on_disk(folder: Path, needle: bytes) -> list[str]:
    return [p.name for p in folder.rglob("*") if p.is_file() and needle in p.read_bytes()]


def test_samples_come_back_in_the_order_asked(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.put_samples(["a", "it's", "c"], text=["1", "2", None], image=[b"\x89PNG", None, None], label=list("xyz"))
        store.put_samples([])
    actual = RunStore.open(tmp_path / "run").samples(["it's", "nobody", "a", "it's"])
    assert actual.to_pydict() == {
        "id": ["it's", "a"],
        "text": ["2", "1"],
        "image": [None, b"\x89PNG"],
        "label": ["y", "x"],
        "source": [None, None],
    }
    assert RunStore.open(tmp_path / "run").samples([]).num_rows == 0


def test_the_last_of_equal_ids_wins(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.put_samples(["a", "b", "a"], text=["old", "b", "newer"])
        store.put_samples(["c", "a"], text=["c", "newest"])
        assert dict(zip(*store.samples().select(["id", "text"]).to_pydict().values(), strict=True)) == {
            "a": "newest",
            "b": "b",
            "c": "c",
        }


def test_a_column_that_is_given_later_leaves_the_others(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.put_samples(["a", "b"], text=["1", "2"], label=["x", "y"])
        store.put_samples(["b", "c", "b"], source=["old", "web", "new"], label=[None, "z", None])
        assert store.samples(["a", "b", "c"]).select(["text", "label", "source"]).to_pydict() == {
            "text": ["1", "2", None],
            "label": ["x", None, "z"],
            "source": [None, "new", "web"],
        }


def test_many_ids_at_once(tmp_path: Path) -> None:
    ids = [f"id-{i}" for i in range(1203)]
    with new_run(tmp_path / "run") as store:
        store.put_samples(ids, source=["web"] * 1203)
        assert store.samples(ids[::-1])["id"].to_pylist() == ids[::-1]
        assert store.erase_samples(ids[1:]) == 1202
        assert store.samples()["id"].to_pylist() == ids[:1]


@pytest.mark.parametrize("ids", [["a"], ["a", "b"], None])
def test_erased_text_is_gone_from_the_disk(tmp_path: Path, ids: list[str] | None) -> None:
    with new_run(tmp_path / "run", 3) as store:
        store.put_samples(["a", "b"], text=["MY-SECRET-TEXT", "OTHER-TEXT"])
        store.put_samples(["a"], text=["MY-SECRET-TEXT-2"])
        assert on_disk(tmp_path / "run", b"MY-SECRET-TEXT"), "the text cannot be found even before it is erased"
        assert store.erase_samples(ids) == (1 if ids == ["a"] else 2)
        assert on_disk(tmp_path / "run", b"MY-SECRET-TEXT") == []
        assert store.samples()["id"].to_pylist() == (["b"] if ids == ["a"] else [])
        assert bool(on_disk(tmp_path / "run", b"OTHER-TEXT")) == (ids == ["a"])
        assert store.n_steps() == 3
        store.put_samples(["a"], text=["again"])
    assert RunStore.open(tmp_path / "run").samples(["a"])["text"].to_pylist() == ["again"]


def test_erasing_what_is_not_there(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        assert store.erase_samples(["a"]) == 0
        assert store.erase_samples([]) == 0
        assert store.erase_samples(None) == 0


def test_columns_of_another_length_are_refused(tmp_path: Path) -> None:
    with (
        new_run(tmp_path / "run") as store,
        pytest.raises(UsageError, match="text must have one value per id, got 1 values for 2 ids"),
    ):
        store.put_samples(["a", "b"], text=["1"])
