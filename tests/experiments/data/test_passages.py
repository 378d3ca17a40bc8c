"""The byte GPT from scratch on eight domains comes from its seed; here on made-up text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experiments.data.passages import QUERIES, recipe
from tests.demo.test_texts import HOSTILE, LETTERS, made_up

from backstory.demo.data import Bytes
from backstory.demo.data.typed import text_of
from backstory.errors import UsageError
from experiments.data import passages

TINY: dict[str, Any] = {"steps": 8, "batch_size": 4, "length": 12, "layers": 1, "width": 16}


def without_network() -> Iterator[None]:
    """`corpus` made up, and nothing remembered before or after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "corpus", made_up)
        _forget()
        yield
    _forget()


def _forget() -> None:
    passages.passages.cache_clear()
    passages._pool.cache_clear()


text = pytest.fixture(autouse=True)(without_network)


def test_no_passage_is_used_twice() -> None:
    plan = recipe(**TINY)
    trained = torch.cat([tokens for _, tokens in plan.batches])
    asked = torch.cat([plan.queries[name] for name in ("code", "law", "poems")])
    assert [tuple(x.shape) for x in (trained, asked)] == [(32, 13), (3 * QUERIES, 13)]
    both = torch.cat([trained, asked])
    assert len(both.unique(dim=0)) == len(both)


def test_ids_name_the_source_of_their_own_text() -> None:
    for ids, tokens in recipe(**TINY).batches:
        for name, row in zip(ids, tokens, strict=True):
            assert set(text_of(row, Bytes())) - set(HOSTILE) <= set(LETTERS[str(name).split("/")[0]])


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="has 132 passages for training, and this run needs 400"):
        recipe(**{**TINY, "steps": 100})


def test_it_can_be_typed_to_and_shown() -> None:
    page = recipe(**TINY).page
    assert page.text is not None
    assert page.show is not None
    assert page.show(page.text("the court")) == [{"text": "the court"}]
