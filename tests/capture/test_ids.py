"""Ids from a data set to the run: any item, any loader, one kind, no doubles."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import backstory
from backstory.capture.ids import as_text, counts, owners, restore
from backstory.errors import UsageError


class Items:
    """A map-style data set that is no `Dataset`."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


VALUES = [torch.tensor([float(i)]) for i in range(5)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on a fork with threads
@pytest.mark.parametrize("workers", [0, 2])
def test_ids_travel_with_tuples_dicts_and_single_items(workers: int) -> None:
    tuples = Items([(x, i % 2) for i, x in enumerate(VALUES)])
    for ids, x, y in DataLoader(backstory.with_ids(tuples), batch_size=2, num_workers=workers):
        assert torch.equal(x[:, 0].long(), ids)
        assert torch.equal(y, ids % 2)
    dicts = Items([{"x": x} for x in VALUES])
    names = [f"name-{i}" for i in range(5)]
    for batch in DataLoader(backstory.with_ids(dicts, names), batch_size=2, num_workers=workers):
        assert batch["sample_id"] == [names[int(x)] for x in batch["x"]]
    for ids, x in DataLoader(backstory.with_ids(Items(list(VALUES))), batch_size=3, num_workers=workers):
        assert torch.equal(x[:, 0].long(), ids)


def test_with_ids_gives_the_items_in_their_order() -> None:
    data = backstory.with_ids(Items([[7, 8], [9, 10]]), [30, 40])
    assert data[0] == (30, 7, 8)
    assert len(data) == 2  # type: ignore[arg-type]


def test_with_ids_says_what_is_wrong() -> None:
    class Stream(IterableDataset[int]):
        """No length, no index."""

        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(UsageError, match=r"Stream has no length.*yield its own ids"):
        backstory.with_ids(Stream())
    with pytest.raises(UsageError, match="one entry per item, got 2 ids for 5 items"):
        backstory.with_ids(Items(VALUES), [1, 2])
    with pytest.raises(UsageError, match="ids must be unique: two items share one"):
        backstory.with_ids(Items([1, 2]), ["a", "a"])
    with pytest.raises(UsageError, match=r"already have a key 'sample_id'. Use it"):
        backstory.with_ids(Items([{"sample_id": 3}]))[0]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (torch.tensor([3, 1]), (["3", "1"], "int")),
        (torch.tensor([3, 1], dtype=torch.int32), (["3", "1"], "int")),
        (np.array([3, 1]), (["3", "1"], "int")),
        ([torch.tensor(3), np.int64(1)], (["3", "1"], "int")),
        (("a", "b"), (["a", "b"], "str")),
        (range(2), (["0", "1"], "int")),
        (iter(["x"]), (["x"], "str")),
    ],
)
def test_ids_become_text_and_their_kind_is_known(ids: Any, expected: tuple[list[str], str]) -> None:
    assert as_text(ids) == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, "a"], "must be all ints or all strings, got int, str"),
        (torch.tensor([1.5]), "all strings, got float"),
        ([True, False], "all strings, got bool"),
        ([None], "all strings, got NoneType"),
        (torch.tensor(3), "must be a sequence .* got the single id 3"),
    ],
)
def test_other_ids_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_text(ids)


def test_restore_is_the_inverse_of_as_text() -> None:
    for ids in ([3, -1, 2**40], ["3", "x y", "ü"]):
        assert restore(*as_text(ids)) == ids


def test_rows_belong_to_samples_by_number() -> None:
    assert owners([0, 1, 0, 1], 2) == owners(torch.tensor([[0, 1], [0, 1]]), 2) == [0, 1, 0, 1]
    for bad in ([0, 0], [0, 1, 2], [0.0, 1.0], [-1, 0, 1], []):
        with pytest.raises(UsageError, match=r"which of the 2 ids it belongs to.*list\(range\(2\)\) \* 2"):
            owners(bad, 2)  # type: ignore[arg-type]


def test_token_counts_are_one_for_each_sample() -> None:
    assert counts(torch.tensor([[3], [0]]), 2).tolist() == [3.0, 0.0]
    for bad in ([3], [3, -1]):
        with pytest.raises(UsageError, match="token counts must be ≥ 0, one per sample"):
            counts(bad, 2)
