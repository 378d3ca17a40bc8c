"""The index over embeddings: products and not angles, whole or not there, never of embeddings that are gone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.builders import LAYERS, record, records
from torch import Tensor

from backstory.errors import StoreError, UsageError
from backstory.store import RunStore
from backstory.store import index as module
from backstory.store.index import Indexes, VectorTable, identity, partitions_for

STEPS, SIZE, WIDTH = 4, 100, 12
ROWS = STEPS * SIZE


def run_of(path: Path, E: Tensor | None = None, encoding: str = "float16") -> RunStore:
    store = RunStore.create(path, layers=LAYERS, encoding="float64", n_groups=2, config={})
    store.append([record(t, size=SIZE) for t in range(STEPS)])
    embed(store, made(0) if E is None else E, encoding)
    return store


def made(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embed(store: RunStore, E: Tensor, encoding: str = "float16") -> None:
    store.write_embeddings(STEPS, [(150, E[150:]), (0, E[:150])], {}, encoding)


def build(store: RunStore, E: Tensor) -> dict[str, object]:
    facts = store.write_index(STEPS, [(0, E[:150]), (150, E[150:])], float(E.abs().max()))
    store.settle_index(STEPS, facts)
    return facts


def best(E: Tensor, q: Tensor, k: int) -> list[int]:
    found: list[int] = np.argsort(-(E.numpy() @ q.numpy()), kind="stable")[:k].tolist()
    return found


def test_candidates_hold_the_largest_products_at_both_ends(tmp_path: Path) -> None:
    E, q = made(0), made(1)[0]
    with run_of(tmp_path / "run", E) as store:
        facts = build(store, E)
    reader = RunStore.open(tmp_path / "run")
    assert reader.index(STEPS) == facts
    for query in (q, -q, 1e-30 * q, 1e30 * q, q.float()):
        found = reader.nearest(facts, query, 60, 1)
        assert len(found) == 60
        assert len(set(found) & set(best(E, query.double(), 10))) >= 9, (
            "3 bits a coordinate lose one of 10 at most here"
        )


def test_products_count_and_not_angles_or_distances(tmp_path: Path) -> None:
    """Along q lies a short row (the best angle), at q another (the nearest), and far out one with the largest product."""
    q = torch.zeros(WIDTH, dtype=torch.float64)
    q[0] = 1.0
    E = 1e-3 * made(0)
    E[5], E[6] = 0.01 * q, q
    E[250] = 5 * q
    E[250, 1:] = 3.0
    E[251] = -E[250]
    with run_of(tmp_path / "run", E) as store:
        facts = build(store, E)
        assert store.nearest(facts, q, 3, 1)[:2] == [250, 6]
        assert store.nearest(facts, -q, 3, 1)[0] == 251, "the lowest product is the nearest to −q"


def test_it_is_the_index_that_is_searched_and_by_products(tmp_path: Path) -> None:
    """Lance reads all rows without a word where an index has another metric than the question."""
    with run_of(tmp_path / "run") as store:
        facts = build(store, made(0))
    table = VectorTable(tmp_path / "run/idx-00000004.lance", version=int(str(facts["version"])))
    assert [x["metric_type"] for x in table._ds.stats.index_stats("v_idx")["indices"]] == ["dot"]
    asked: list[dict[str, object]] = []

    class Spy:
        def to_table(self, **given: object) -> object:
            asked.append(given)
            return table._ds.to_table(**given)

    spied = VectorTable(tmp_path / "run/idx-00000004.lance")
    spied._ds = Spy()
    spied.nearest(torch.zeros(16, dtype=torch.float16), 5, 1)
    plan = table._ds.scanner(**asked[0]).explain_plan()
    assert "ANN" in plan, plan
    assert "metric=Dot" in plan, plan


@pytest.mark.parametrize("encoding", ["float16", "int8", "float64"])
def test_scales_of_rows_and_blocks_are_in_the_products(encoding: str, tmp_path: Path) -> None:
    """Codes alone would take every row and block for equally large; and float16 ends at 65,504."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(5))
    E = made(0) * 10 ** torch.linspace(-4, 0, ROWS, dtype=torch.float64)[order][:, None]
    E[:, :5] *= 100
    E *= 1e5
    with run_of(tmp_path / "run", E, encoding) as store:
        stored = store.read_embeddings(STEPS, 0, ROWS, dtype=torch.float64)
        facts = build(store, stored)
        asked = made(2)[:50]
        found = [len(set(store.nearest(facts, q, 60, 1)) & set(best(E, q, 10))) for q in asked]
    assert sum(found) >= 9 * len(asked), f"Lance's own draws move single questions: {found}"


def test_single_embeddings_and_labels(tmp_path: Path) -> None:
    rows = [7, 399, 7, 150, 149, 0]
    with run_of(tmp_path / "run") as store:
        every = store.read_embeddings(STEPS, 0, ROWS, dtype=torch.float64)
        assert torch.equal(store.take_embeddings(STEPS, rows, dtype=torch.float64), every[rows])
        assert store.take_embeddings(STEPS, rows).dtype == torch.float32
        store.truncate(2)
        store.append([record(t, size=50) for t in (2, 3)])
        ids, steps = store.labels([0, 199, 200, 299, 250])
    assert ids == ["sample-0-0", "sample-1-99", "sample-2-0", "sample-3-49", "sample-3-0"], (
        "by position, not by Lance's id"
    )
    assert steps == [0, 1, 2, 3, 3]


def test_an_index_is_there_once_it_is_settled(tmp_path: Path) -> None:
    E = made(0)
    with run_of(tmp_path / "run", E) as store:
        assert store.index(STEPS) is None
        facts = store.write_index(STEPS, [(0, E)], 5.0)
        assert store.index(STEPS) is None
        assert RunStore.open(tmp_path / "run").index(STEPS) is None
        assert len(store.nearest(facts, E[0], 5, 1)) == 5, "it can be tried"
        store.settle_index(STEPS, {**facts, "probes": 1})
        assert store.index(STEPS) == {**facts, "probes": 1}
        assert store.index_bytes(STEPS) > ROWS * 16 * 2
        assert store.verify() == []
    with pytest.raises(UsageError, match="reading only"):
        RunStore.open(tmp_path / "run").write_index(STEPS, [], 1.0)


def rewritten(store: RunStore) -> None:
    embed(store, made(0))  # the very same numbers


def dropped(store: RunStore) -> None:
    store.drop_embeddings(STEPS)


def dropped_and_rewritten(store: RunStore) -> None:
    before = version(store)
    store.drop_embeddings(STEPS)
    embed(store, made(3))
    assert version(store) == before, "Lance counts versions from 1 again: a number alone would not tell"


def truncated(store: RunStore) -> None:
    store.truncate(STEPS - 1)


def truncated_and_recorded(store: RunStore) -> None:
    store.truncate(STEPS - 1)
    store.append([record(STEPS - 1, size=SIZE)])
    embed(store, made(3))


def version(store: RunStore) -> int:
    return int(store._embeddings.facts()[(STEPS,)]["version"])


CHANGES = [rewritten, dropped, dropped_and_rewritten, truncated, truncated_and_recorded]


@pytest.mark.parametrize("change", CHANGES)
def test_an_index_of_embeddings_that_are_gone_is_gone(change: Callable[[RunStore], None], tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as store:
        build(store, made(0))
        change(store)
        assert store.index(STEPS) is None
    assert not list((tmp_path / "run").glob("idx-*")), "and takes no more room"


@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_index_is_not_used_even_where_nothing_removed_it(
    change: Callable[[RunStore], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: Indexes, files: object) -> None:
        """As if the process had been killed before."""

    with run_of(tmp_path / "run") as store:
        build(store, made(0))
        early = RunStore.open(tmp_path / "run")
        assert early.index(STEPS) is not None
        with monkeypatch.context() as patch:
            patch.setattr(Indexes, "sweep", nothing)
            change(store)
        assert len(list((tmp_path / "run").glob("idx-*"))) == 2
        assert store.index(STEPS) is None
        fresh = RunStore.open(tmp_path / "run")
        assert fresh.index(STEPS) is None
    RunStore.open(tmp_path / "run", write=True).close()
    assert not list((tmp_path / "run").glob("idx-*")), "the next writer sweeps it"


def test_an_index_built_again_is_the_one_that_is_searched(tmp_path: Path) -> None:
    one, two = made(0), made(3)
    with run_of(tmp_path / "run", one) as store:
        reader, first = RunStore.open(tmp_path / "run"), build(store, one)
        assert reader.nearest(first, one[9] * 50, 1, 1)
        embed(store, two)
        second = build(store, two)
        assert second["of"] != first["of"]
        for q in made(4)[:5]:
            assert len(set(reader.nearest(second, q, 60, 1)) & set(best(two, q, 10))) >= 9


@pytest.mark.parametrize("place", ["commit_overwrite", "build"])
def test_an_interrupted_build_leaves_nothing(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with run_of(tmp_path / "run") as store:
        where = VectorTable if place == "build" else module
        monkeypatch.setattr(where, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.write_index(STEPS, [(0, made(0))], 5.0)
        assert not list((tmp_path / "run").glob("idx-*"))


def test_what_a_killed_build_left_is_swept(tmp_path: Path) -> None:
    with run_of(tmp_path / "run") as store:
        store.write_index(STEPS, [(0, made(0))], 5.0)
    assert (tmp_path / "run/idx-00000004.lance").exists()
    assert RunStore.open(tmp_path / "run").index(STEPS) is None
    RunStore.open(tmp_path / "run", write=True).close()
    assert not (tmp_path / "run/idx-00000004.lance").exists()


def test_the_index_is_on_disk_before_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of(tmp_path / "run") as store:
        flushed: list[Path] = []
        monkeypatch.setattr("backstory.store.tables.fsync", flushed.append)
        facts = store.write_index(STEPS, [(0, made(0))], 5.0)
        folder = tmp_path / "run/idx-00000004.lance"
        files = {x for x in folder.rglob("*") if x.is_file() and x.parent.name != "_transactions"}
        last = min((folder / "_versions").glob("*.manifest"))
        missing = {x.name for x in files - set(flushed) if x.suffix == ".lance" or x.suffix == ".idx" or x == last}
        assert not missing
        assert last.name == f"{2**64 - 1 - int(str(facts['version'])):020d}.manifest"
        assert any(x.parent.parent.name == "_indices" for x in flushed)


def test_nothing_to_index(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", layers=LAYERS, encoding="float64", n_groups=2, config={})
    with store, pytest.raises(StoreError, match="no embeddings before step 0 to index"):
        store.write_embeddings(0, [], {})
        store.write_index(0, [], 1.0)


def test_embeddings_of_zeros(tmp_path: Path) -> None:
    E = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    with run_of(tmp_path / "run", E) as store:
        facts = store.write_index(STEPS, [(0, E)], 0.0)
        assert len(store.nearest(facts, E[0], 7, 1)) == 7


def test_how_many_partitions() -> None:
    assert [partitions_for(n) for n in (1, 30_000, 40_000, 1_000_000, 10**9)] == [1, 1, 2, 61, 4096]
    assert identity(["a", "bc"]) != identity(["ab", "c"])


def test_more_rows_than_a_step_has_records_for_are_no_concern_of_the_index(tmp_path: Path) -> None:
    """An index at an earlier checkpoint has the rows before it."""
    with run_of(tmp_path / "run") as store:
        store.append([replace(r, step=STEPS) for r in records(STEPS, STEPS + 1)])
        facts = build(store, made(0))
        assert facts["rows"] == ROWS
        assert store.index(STEPS) is not None
