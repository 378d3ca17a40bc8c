"""Embeddings: aligned with the rows, whole or not there."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.store.builders import new_run, records
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.errors import BackstoryError, FormatError, NumericalError, StoreError, UsageError
from backstory.maths.encoding import DTYPES, looseness
from backstory.store import RunStore

ROWS = 9  # of 5 steps


def embedding(seed: int, n: int = ROWS) -> Tensor:
    return torch.randn(n, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def blocks(E: Tensor, *cuts: int) -> Iterator[tuple[int, Tensor]]:
    """`E` cut at `cuts`, last block first."""
    edges = [0, *cuts, len(E)]
    for lo, hi in reversed(list(pairwise(edges))):
        yield lo, E[lo:hi]


def test_embeddings_come_back_in_row_order(tmp_path: Path) -> None:
    E = embedding(0)
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(E, 3, 4), {"contraction": 1}, encoding="float64")
        assert torch.equal(store.read_embeddings(5, 0, ROWS, dtype=torch.float64), E)
        assert store.verify() == []
    reader = RunStore.open(tmp_path / "run")
    assert reader.embeddings() == {5: {"contraction": 1}}
    assert torch.equal(reader.read_embeddings(5, 2, 6, dtype=torch.float64), E[2:6])


def test_the_default_encoding_rounds_relative_to_each_block(tmp_path: Path) -> None:
    E = embedding(0) * 1e-9
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(E, 3), {})
        assert (store.read_embeddings(5, 0, ROWS, dtype=torch.float64) - E).abs().max() < 2e-12


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("encoding", DTYPES)
def test_every_encoding_comes_back_with_one_vector_and_with_two(tmp_path: Path, encoding: str, parts: int) -> None:
    E = torch.cat([embedding(i) for i in range(parts)], 1)
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(E, 3), {"parts": parts}, encoding)
        assert_close(store.read_embeddings(5, 0, ROWS, dtype=torch.float64), E, looseness(encoding))


def test_embeddings_in_an_encoding_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(embedding(0)), {})
    facts = tmp_path / "run/emb-00000005.json"
    facts.write_text(facts.read_text().replace("float16", "4 bits"))
    with pytest.raises(FormatError, match=r"emb-00000005.lance stores numbers as 4 bits, .* newer version"):
        RunStore.open(tmp_path / "run").read_embeddings(5, 0, 1)


def test_an_earlier_checkpoint_has_the_rows_before_it(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(2, blocks(embedding(0, 3)), {})
        store.write_embeddings(0, [], {})
        assert sorted(store.embeddings()) == [0, 2]
        assert store.read_embeddings(2, 0, 3).shape == (3, 12)
        with pytest.raises(UsageError, match=r"are out of range: .* has 3 rows"):
            store.read_embeddings(2, 0, 4)
        with pytest.raises(UsageError, match="has 5 steps"):
            store.write_embeddings(6, [], {})


E = embedding(1)
MISALIGNED: dict[str, tuple[list[tuple[int, Tensor]], type[BackstoryError], str]] = {
    "a gap": ([(6, E[6:]), (0, E[:5])], StoreError, "a block that ends at row 6, got rows 0 to 5"),
    "an overlap": ([(6, E[6:]), (0, E[:7])], StoreError, "a block that ends at row 6"),
    "first block first": ([(0, E[:6]), (6, E[6:])], StoreError, "a block that ends at row 9"),
    "the start missing": ([(6, E[6:])], StoreError, "are missing rows 0 to 6"),
    "too wide": ([(0, torch.zeros(9, 13))], UsageError, re.escape("must have shape (n, 12)")),
    "an overflow": ([(0, E * torch.inf)], NumericalError, "NaN or Inf in rows 0 to 9"),
}


@pytest.mark.parametrize("name", list(MISALIGNED))
@pytest.mark.parametrize("earlier", [False, True])
def test_misaligned_blocks_leave_what_was_there(tmp_path: Path, name: str, earlier: bool) -> None:
    wrong, kind, message = MISALIGNED[name]
    old = embedding(2)
    with new_run(tmp_path / "run", 5) as store:
        if earlier:
            store.write_embeddings(5, blocks(old, 4), {"v": 1}, "float64")
        with pytest.raises(kind, match=message):
            store.write_embeddings(5, wrong, {"v": 2}, "float64")
        assert store.embeddings() == ({5: {"v": 1}} if earlier else {})
        if earlier:
            assert torch.equal(store.read_embeddings(5, 0, ROWS, dtype=torch.float64), old)
        assert (tmp_path / "run/emb-00000005.lance").exists() == earlier


@pytest.mark.parametrize("where", ["write_json", "commit_overwrite"])
def test_an_interrupted_write_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    old, new = embedding(2), embedding(3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(old), {"v": 1}, "float64")
        with monkeypatch.context() as patch:
            patch.setattr(f"backstory.store.embeddings.{where}", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.write_embeddings(5, blocks(new), {"v": 2}, "int8")
    with RunStore.open(tmp_path / "run", write=True) as store:
        assert store.embeddings() == {5: {"v": 1}}
        assert torch.equal(store.read_embeddings(5, 0, ROWS, dtype=torch.float64), old)
        store.write_embeddings(5, blocks(new, 2, 5), {"v": 3}, "float32")
        assert store.embeddings() == {5: {"v": 3}}
        assert torch.equal(store.read_embeddings(5, 0, ROWS), new.float())


def test_what_a_killed_first_write_left_is_swept(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(embedding(2)), {})
    (tmp_path / "run/emb-00000005.json").unlink()
    assert RunStore.open(tmp_path / "run").embeddings() == {}
    RunStore.open(tmp_path / "run", write=True).close()
    assert not (tmp_path / "run/emb-00000005.lance").exists()


def test_truncating_drops_later_embeddings_only(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        for at, n in ((2, 3), (3, 6), (5, 9)):
            store.write_embeddings(at, blocks(embedding(0, n)), {})
        store.truncate(3)
        assert sorted(store.embeddings()) == [2, 3]
        store.append(records(3, 5))
        assert sorted(store.embeddings()) == [2, 3]
        assert store.verify() == []
        with pytest.raises(StoreError, match=r"no embeddings for checkpoint 5 \(stored: \[2, 3\]\)"):
            store.read_embeddings(5, 0, 1)
    names = [p.name for p in sorted((tmp_path / "run").glob("emb-*"))]
    assert names == [f"emb-0000000{at}.{kind}" for at in (2, 3) for kind in ("json", "lance")]


def test_verify_sees_an_embedding_of_other_rows(tmp_path: Path) -> None:
    with new_run(tmp_path / "run", 5) as store:
        store.write_embeddings(5, blocks(embedding(0)), {})
        store.write_embeddings(3, blocks(embedding(0, 6)), {})
    for kind in ("json", "lance"):
        (tmp_path / f"run/emb-00000003.{kind}").rename(tmp_path / f"run/emb-00000004.{kind}")
    assert RunStore.open(tmp_path / "run").verify() == ["the embedding at 4 has 6 rows, expected 7."]
