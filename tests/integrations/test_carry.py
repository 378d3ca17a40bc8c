"""Ids that travel with batches: whatever the data set, the collator and the workers do."""

import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import backstory
from backstory.errors import UsageError
from backstory.integrations.carry import carry, decoded, encoded, queued


def items(n: int = 7) -> Any:
    return [{"x": torch.tensor(float(i)), "uid": f"u{i}"} for i in range(n)]


def stack(actual: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator that keeps nothing but x, and would not know ids."""
    return {"x": torch.stack([item["x"] for item in actual])}


def loader(data: Any = None, **more: Any) -> DataLoader[Any]:
    return DataLoader(items() if data is None else data, **{"batch_size": 3, "collate_fn": stack, **more})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from items()


class Many(list[Any]):
    """A data set that is asked for a whole batch at once."""

    asked: list[Any]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked = indices
        return [self[i] for i in indices]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def carried(batches: DataLoader[Any]) -> list[tuple[list[int | str], list[float]]]:
    return [(decoded(b["sample_id"]), b["x"].tolist()) for b in batches]


@given(
    st.one_of(
        st.lists(st.integers(-(2**40), 2**40), min_size=1),
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1),
    )
)
def test_ids_become_a_tensor_and_come_back(names: list[int | str]) -> None:
    assert decoded(encoded(names)) == names


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_are_ids_in_any_order(workers: int) -> None:
    batches = loader(shuffle=True, num_workers=workers)
    carry(batches, None)
    for _ in range(2):
        actual = carried(batches)
        assert sorted(x for _, values in actual for x in values) == list(range(7))
        assert all(names == values for names, values in actual)


def test_workers_that_are_started_anew_get_picklable_things() -> None:
    batches = loader(num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn"))
    carry(batches, None)
    assert carried(batches)[2] == ([6], [6.0])


def test_ids_may_be_listed_or_lie_in_a_column() -> None:
    for ids in ([f"u{i}" for i in range(7)], "uid"):
        batches = loader()
        carry(batches, ids)
        assert carried(batches)[1] == (["u3", "u4", "u5"], [3.0, 4.0, 5.0])


def test_a_data_set_with_ids_of_its_own_keeps_them() -> None:
    batches = loader(backstory.with_ids(items(), [f"mine {i}" for i in range(7)]))
    carry(batches, None)
    assert carried(batches)[0][0] == ["mine 0", "mine 1", "mine 2"]


def test_batch_samplers_and_batched_look_ups() -> None:
    data: Any = Many(items())
    batches: DataLoader[Any] = DataLoader(
        data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=True), collate_fn=stack
    )
    carry(batches, None)
    assert carried(batches) == [([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])]
    assert data.asked == [0, 1, 2, 3]
    batches.dataset.set_epoch(5)  # type: ignore[attr-defined]
    assert data.epoch == 5


def test_what_was_done_to_a_loader_can_be_undone() -> None:
    batches = loader()
    before = (batches.dataset, batches.collate_fn)
    undo = carry(batches, None)
    undo()
    assert (batches.dataset, batches.collate_fn) == before
    carry(batches, None)
    carry(batches, "uid")  # a second time, over the first, as a trainer that trains again does
    assert batches.dataset.dataset is before[0]  # type: ignore[attr-defined]


def test_a_queue_gets_the_ids_and_the_batches_stay_as_they_were() -> None:
    queue: deque[list[int | str]] = deque()
    mine = loader(sampler=RandomSampler(items(), generator=torch.Generator().manual_seed(3)))
    twin = queued(mine, None, queue)
    assert isinstance(twin, DataLoader)
    assert len(twin) == 3
    seen = []
    for batch in twin:
        assert set(batch) == {"x"}
        assert queue.popleft() == batch["x"].tolist()
        seen += batch["x"].tolist()
    plain = loader(sampler=RandomSampler(items(), generator=torch.Generator().manual_seed(3)))
    assert seen == [x for batch in plain for x in batch["x"].tolist()]
    assert mine.collate_fn is stack
    assert type(mine) is DataLoader


def test_a_queue_forgets_what_was_fetched_and_not_used() -> None:
    queue: deque[list[int | str]] = deque()
    twin = queued(loader(), None, queue)
    next(iter(twin))
    next(iter(twin))
    assert list(queue) == [[0, 1, 2]]


def test_an_iterable_data_set_needs_a_column() -> None:
    batches = loader(Stream())
    carry(batches, "uid")
    assert carried(batches)[2] == (["u6"], [6.0])
    carry(batches, None)
    with pytest.raises(UsageError, match=r"no id under the key 'sample_id', only \['uid', 'x'\].*must yield an id"):
        next(iter(batches))
    with pytest.raises(UsageError, match="cannot be a list for Stream, an iterable dataset"):
        carry(batches, [1, 2, 3])


def test_what_has_no_ids_is_refused() -> None:
    with pytest.raises(UsageError, match="ids must be all ints or all strings, got float"):
        encoded([1.5, 2.5])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="got 3 ids for 7 items"):
        carry(loader(), [1, 2, 3])
    with pytest.raises(UsageError, match="batch_size=None"):
        carry(DataLoader(items(), batch_size=None), None)
    words = DataLoader({"a": items()[0]}, batch_size=1, sampler=["a"], collate_fn=stack)  # type: ignore[arg-type, var-annotated]
    carry(words, None)
    with pytest.raises(UsageError, match="requests item 'a' of the training data, which is not a number"):
        next(iter(words))
