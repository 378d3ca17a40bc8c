"""What is planted is planted, and all else stays; on made-up text and small digits."""

import pytest
import torch
from experiments.planted.setups import SPOILS, mean_passage, problem_of
from tests.experiments.data.test_passages import without_network
from tests.experiments.data.test_texts import TINY

from backstory.errors import UsageError
from experiments.data import images as image_setups
from experiments.data import texts as text_setups

DIGITS = image_setups.setup_of("tiny", "gelu", "sgd", 2, 96)

text = pytest.fixture(autouse=True)(without_network)


@pytest.mark.parametrize("kind", SPOILS)
def test_planted_passages_are_spoiled_and_no_others(kind: str) -> None:
    actual = problem_of(TINY, kind, 0, 0.1)
    assert len(actual.planted) == 5
    plain, spoiled = text_setups.recipe(TINY, 0), actual.make()
    for (ids, before), (same, after) in zip(plain.batches, spoiled.batches, strict=True):
        assert list(ids) == list(same)
        for name, a, b in zip(ids, before, after, strict=True):
            assert torch.equal(a, b) != (name in actual.planted)
            if kind == "shuffled":
                assert torch.equal(a.sort().values, b.sort().values)
            if kind == "repeated" and name in actual.planted:
                assert bytes(b.tolist()) == (bytes(a[:4].tolist()) * 4)[:13]
            if kind == "reversed" and name in actual.planted:
                assert torch.equal(a, b.flip(0))
    assert torch.equal(actual.queries, plain.queries["domains"].flatten(0, 1))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(spoiled.batches, actual.make().batches, strict=True))


def test_uniform_bytes_are_of_all_kinds() -> None:
    drawn = SPOILS["uniform"](torch.zeros(4000, dtype=torch.int64), torch.Generator().manual_seed(0))
    assert len(drawn.unique()) == 256
    assert drawn.dtype == torch.int64


def test_wrong_labels_are_wrong_and_the_same_in_every_epoch() -> None:
    actual = problem_of(DIGITS, "labels", 0, 0.5)
    plain, spoiled = image_setups.recipe(DIGITS, 0), actual.make()
    seen: dict[int, set[int]] = {}
    for (ids, (x, y)), (_, (same, z)) in zip(plain.batches, spoiled.batches, strict=True):
        assert torch.equal(x, same)
        for i, right, label in zip(ids, y, z, strict=True):
            assert (int(right) == int(label)) != (str(i) in actual.planted)
            assert 0 <= int(label) < 10
            seen.setdefault(int(i), set()).add(int(label))
    assert len(actual.planted) == 48
    assert all(len(labels) == 1 for labels in seen.values())
    assert torch.equal(actual.queries[1], plain.queries["test"][1])


def test_the_query_is_the_mean_over_all_clean_tokens() -> None:
    actual = problem_of(TINY, "shuffled", 0, 0.1)
    model = actual.make().model
    with torch.no_grad():
        logits = model(actual.queries[:, :-1]).flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, actual.queries[:, 1:].flatten())
        torch.testing.assert_close(mean_passage(model, actual.queries), expected)
        torch.testing.assert_close(actual.loss(model, actual.queries), expected)


def test_what_cannot_be_planted_is_refused() -> None:
    for kind, share in (("some", 0.1), ("shuffled", 0.0), ("shuffled", 1.0)):
        with pytest.raises(UsageError, match="must be one of shuffled, uniform, reversed, repeated, labels"):
            problem_of(TINY, kind, 0, share)
    with pytest.raises(UsageError, match="labels are corrupted in images"):
        problem_of(TINY, "labels", 0, 0.1)
    with pytest.raises(UsageError, match="labels are corrupted in images"):
        problem_of(DIGITS, "shuffled", 0, 0.1)
    with pytest.raises(UsageError, match="so that some stay clean"):
        problem_of(DIGITS, "labels", 0, 0.999)
