"""The samples of a recipe, each once."""

from typing import Any

import pytest
import torch
from tests.baselines.problems import data, mlp, order, recipe

from backstory import Recipe
from backstory.baselines.training import join, select, size_of, split, survey
from backstory.errors import UsageError


def test_every_sample_once_at_its_last_step() -> None:
    made = recipe(size=7, epochs=3)
    found = survey(made)
    last = {str(i): t for t, ids in enumerate(order(30, 7, 3)) for i in ids}
    assert dict(zip(found.samples, found.steps, strict=True)) == last
    assert len(found) == 30
    assert found.steps == sorted(found.steps)
    assert [s for s, keep in found.visits for _ in keep] == found.steps
    assert found.kind == "int"


def test_split_gives_the_samples_in_the_order_of_the_columns() -> None:
    made = recipe(size=7, epochs=3)
    x, y = data()
    parts = split(made, survey(made))
    ids = [int(s) for s in survey(made).samples]
    whole = join(parts)
    assert torch.equal(whole[0], x[ids])
    assert torch.equal(whole[1], y[ids])


def test_batches_of_other_forms() -> None:
    x, y = data()
    assert size_of({"x": (x, y)}) == 30
    assert torch.equal(select({"x": x}, [3, 1], 30)["x"], x[[3, 1]])
    assert torch.equal(join([{"x": x[:2]}, {"x": x[2:]}])["x"], x)
    with pytest.raises(UsageError, match="takes batches apart"):
        select((x, "text"), [0], 30)
    with pytest.raises(UsageError, match="expected tensors"):
        size_of("text")


def test_ids_of_two_kinds_and_no_batches_are_refused() -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data()
    mixed: list[Any] = [([0], (x[:1], y[:1])), (["a"], (x[1:2], y[1:2]))]
    for batches in (mixed[:0], mixed):
        with pytest.raises(UsageError, match="kind"):
            survey(Recipe(model=model, optimizer=sgd, loss=lambda m, b: m(b), batches=batches))


def test_a_sample_twice_in_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        survey(recipe(names=lambda i: i % 3))
