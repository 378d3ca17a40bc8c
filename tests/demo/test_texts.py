"""The text demo's run comes from its seed; here on made-up text."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.support.beginnings import replace_corpus
from tests.support.oracles import assert_same

from backstory.demo.data import Document
from backstory.demo.data.typed import text_of
from backstory.demo.gpt_model import warmup_cosine
from backstory.demo.pretrained import QUERIES, WARMUP, TextSetup, make_beginning
from backstory.demo.stages import Stages
from backstory.demo.texts import FLAT, LEARNING_RATE, recipe, scope
from backstory.replay.recipe import take_step

TINY: dict[str, Any] = {
    "steps": 8, "pretraining": 3, "batch_size": 4, "length": 12, "layers": 1, "width": 16, "vocabulary": 258,
}  # fmt: skip
HOSTILE = "<script>"
LETTERS = {"law": "abcdef", "poems": "ghijkl", "code": "mnopqr"}


def made_up(sources: Sequence[str] | None = None, limit: int = 0) -> list[Document]:
    """Three domains, each with letters of its own and a tag: stands in for `corpus`."""
    out = []
    for k, (source, letters) in enumerate(LETTERS.items()):
        places = torch.randint(6, (900,), generator=torch.Generator().manual_seed(k))
        out.append(Document("0", source, (HOSTILE + "".join(letters[int(x)] for x in places))[:780]))
    return [document for document in out if sources is None or document.source in sources]


def without_network() -> Iterator[None]:
    """`corpus` made up."""
    with pytest.MonkeyPatch.context() as patch:
        replace_corpus(patch, made_up, LETTERS)
        yield


text = pytest.fixture(autouse=True)(without_network)


def test_ids_name_the_source_of_their_own_text() -> None:
    words = make_beginning(TextSetup(**TINY), Stages(None)).tokenizer
    for ids, tokens in recipe(**TINY).batches:
        for name, row in zip(ids, tokens, strict=True):
            assert set(text_of(row, words)) - set(HOSTILE) <= set(LETTERS[str(name).split("/")[0]])


def test_the_first_passage_of_each_domain_is_the_query_set_of_passages() -> None:
    plan = recipe(**TINY)
    assert list(plan.queries) == ["passages", "code", "law", "poems"]
    first = torch.stack([plan.queries[name][0] for name in ("code", "law", "poems")])
    assert plan.queries["passages"].tolist() == first.tolist()
    assert all(len(plan.queries[name]) == QUERIES for name in LETTERS)


def test_the_seed_decides_everything_and_the_model_learns() -> None:
    one, two, other = recipe(**TINY), recipe(**TINY), recipe(**TINY, seed=1)
    assert [ids for ids, _ in one.batches] == [ids for ids, _ in two.batches] != [ids for ids, _ in other.batches]
    first = [float(take_step(one, t).mean()) for t in range(8)]
    again, terms = [float(take_step(two, t).mean()) for t in range(8)], 8 * (16 + 64 + 258 + 4 * 12)
    assert_same(torch.tensor(first), torch.tensor(again), terms)  # width, inner width, vocabulary, tokens of a batch
    assert first[-1] < first[0]


def test_no_step_weighs_more_because_of_its_place() -> None:
    made = recipe(**TINY)
    assert {len(ids) for ids, _ in made.batches} == {TINY["batch_size"]}
    rates = []
    for t in range(TINY["steps"]):
        rates.append(made.optimizer.param_groups[0]["lr"])
        take_step(made, t)
    assert rates == pytest.approx([LEARNING_RATE * warmup_cosine(t, 8, WARMUP, FLAT) for t in range(8)])
    assert rates[-1] == pytest.approx(LEARNING_RATE)


def test_the_fine_tuning_trains_token_embeddings_and_output_layer_only() -> None:
    made = recipe(**TINY)
    before = {name: x.detach().clone() for name, x in made.model.named_parameters()}
    take_step(made, 0)
    moved = {name for name, x in made.model.named_parameters() if not torch.equal(x, before[name])}
    assert moved == {"tokens.weight", "head.weight"}
    assert "trains the token embeddings and the output layer" in scope(TextSetup(**TINY))


def test_what_is_not_recorded_has_numbers() -> None:
    words = scope(TextSetup(**TINY))
    assert "fine-tuning is recorded: 32 passages" in words
    assert "pretrained on 12 other passages" in words
