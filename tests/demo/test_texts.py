"""The text demo's run comes from its seed; here on made-up text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.oracles import assert_same

from backstory.demo import texts
from backstory.demo.data import Document
from backstory.demo.gpt_model import warmup_cosine
from backstory.demo.texts import END, LEARNING_RATE, QUERIES, WARMUP, encode_text, pieces, recipe, show_queries, text_of
from backstory.errors import UsageError
from backstory.replay.recipe import take_step

TINY: dict[str, Any] = {"steps": 8, "batch_size": 4, "length": 12, "layers": 1, "width": 16}
HOSTILE = "<script>"


def made_up(sources: object = None, limit: int = 0) -> list[Document]:
    """Three domains, each with letters of its own and a tag: stands in for `corpus`."""
    out = []
    for k, source in enumerate(("law", "poems", "code")):
        letters = torch.randint(6, (900,), generator=torch.Generator().manual_seed(k)) + 97 + 6 * k
        out.append(Document("0", source, (HOSTILE + "".join(chr(int(x)) for x in letters))[:780]))
    return out


def without_network() -> Iterator[None]:
    """`corpus` made up, and nothing remembered before or after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "corpus", made_up)
        _forget()
        yield
    _forget()


def _forget() -> None:
    texts.passages.cache_clear()
    texts._pool.cache_clear()


text = pytest.fixture(autouse=True)(without_network)


def test_no_passage_is_used_twice() -> None:
    plan = recipe(**TINY)
    trained = torch.cat([tokens for _, tokens in plan.batches])
    asked = torch.cat([plan.queries[name] for name in ("code", "law", "poems")])
    assert [tuple(x.shape) for x in (trained, asked)] == [(32, 13), (3 * QUERIES, 13)]
    both = torch.cat([trained, asked])
    assert len(both.unique(dim=0)) == len(both)
    assert torch.equal(plan.queries["passages"], torch.stack([plan.queries[n][0] for n in ("code", "law", "poems")]))


def test_ids_name_the_source_of_their_own_text() -> None:
    letters = {"law": set("abcdef"), "poems": set("ghijkl"), "code": set("mnopqr")}
    for ids, tokens in recipe(**TINY).batches:
        for name, row in zip(ids, tokens, strict=True):
            assert set(text_of(row)) - set(HOSTILE) <= letters[str(name).split("/")[0]]


def test_the_seed_decides_everything_and_the_net_learns() -> None:
    one, two, other = recipe(**TINY), recipe(**TINY), recipe(**TINY, seed=1)
    assert [ids for ids, _ in one.batches] == [ids for ids, _ in two.batches] != [ids for ids, _ in other.batches]
    first = [float(take_step(one, t).mean()) for t in range(8)]
    again, terms = [float(take_step(two, t).mean()) for t in range(8)], 8 * (16 + 64 + 256 + 4 * 12)
    assert_same(torch.tensor(first), torch.tensor(again), terms)  # width, inner width, vocabulary, tokens of a batch
    assert first[-1] < first[0]


def test_the_rate_warms_up_and_falls_to_a_hundredth() -> None:
    rates = [warmup_cosine(t, 200, WARMUP, END) for t in range(200)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(rates) == pytest.approx(1.0) == rates[10]
    assert rates[-1] == pytest.approx(0.01, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_no_step_weighs_more_because_of_its_place() -> None:
    made = recipe(**TINY)
    assert {len(ids) for ids, _ in made.batches} == {TINY["batch_size"]}
    rates = []
    for t in range(TINY["steps"]):
        rates.append(made.optimizer.param_groups[0]["lr"])
        take_step(made, t)
    expected = [LEARNING_RATE * warmup_cosine(t, TINY["steps"], WARMUP, END) for t in range(TINY["steps"])]
    assert rates == pytest.approx(expected)
    assert rates[-1] < 0.1 * max(rates)


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="has 132 passages for training, and this run needs 400"):
        recipe(**{**TINY, "steps": 100})


@pytest.mark.parametrize("n", [2, 12, 13, 14, 25, 26, 100])
def test_typed_text_is_cut_into_rows_that_hold_every_byte(n: int) -> None:
    text = "".join(chr(97 + k % 26) for k in range(n))
    actual = encode_text(text, length=12)
    assert actual.shape[1] <= 13
    assert len(actual) == -(-(n - 1) // 12)
    rows = [bytes(row).decode() for row in actual.tolist()]
    assert all(row in text for row in rows)
    starts = [text.index(row) if n <= 26 else None for row in rows]
    if n <= 26:
        covered = {
            k
            for start, row in zip(starts, rows, strict=True)
            if start is not None
            for k in range(start, start + len(row))
        }
        assert covered == set(range(n))
    assert rows[0] == text[: len(rows[0])]
    assert rows[-1] == text[-len(rows[-1]) :]


def test_a_text_of_one_byte_is_refused() -> None:
    for text in ("", "a"):
        with pytest.raises(UsageError, match="must have 2 or more"):
            encode_text(text, length=12)


def test_pieces_are_the_letters_at_their_last_byte() -> None:
    tokens = torch.tensor([list("aé€b!".encode())])
    assert pieces(tokens, 0) == ["a", "", "é", "", "", "€", "b"]
    assert "".join(pieces(torch.tensor([list(b"\xff\xff\xff\xffab")]), 0)).endswith("a")


def test_queries_are_shown_as_text() -> None:
    assert show_queries(torch.tensor([list(b"ab"), list(b"cd")])) == [{"text": "ab"}, {"text": "cd"}]
