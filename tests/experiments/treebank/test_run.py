"""The treebank study's run comes from its seed; here on made-up text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from experiments.data.treebank import Treebank
from experiments.treebank.run import TreebankSetup, Words, drawn, known_words, per_word, recipe, shown
from tests.support.oracles import assert_same

from backstory.demo.gpt_model import GPT
from backstory.errors import UsageError
from backstory.replay.recipe import take_step
from experiments.treebank import run as treebank_run

TINY: dict[str, Any] = {
    "sequences": 24,
    "epochs": 3,
    "batch_size": 4,
    "length": 9,
    "layers": 1,
    "width": 16,
    "words": 30,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made_up() -> Treebank:
    """Lines of words of several letters, a few of them rare: stands in for the treebank."""
    g = torch.Generator().manual_seed(0)
    lines = []
    for k in range(90):
        numbers = torch.randint(24, (7,), generator=g).tolist()
        lines.append(" ".join([f"rare{LETTERS[k % 26]}{LETTERS[k // 26]}", *(4 * LETTERS[n] for n in numbers)]))
    return Treebank("\n".join(lines[:60]), "\n".join(lines[60:]), "")


def without_network() -> Iterator[None]:
    """`penn_treebank` made up, and nothing remembered before or after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treebank_run, "penn_treebank", made_up)
        drawn.cache_clear()
        yield
    drawn.cache_clear()


text = pytest.fixture(autouse=True)(without_network)


def test_words_are_the_most_frequent_ones_and_the_rest_is_rare() -> None:
    words = known_words("b a a\nb a rare", 4)
    assert words.known == ("<unk>", "<eos>", "a", "b")
    assert words.encode("a rare b\na") == [2, 0, 3, 1, 2]
    assert words.decode([3, 0, 1]) == "b <unk> <eos>"
    assert words.size == 4


def test_every_epoch_uses_every_sequence_once_in_an_order_of_its_own() -> None:
    setup, plan = TreebankSetup(**TINY), recipe(**TINY)
    assert setup.ends == [6, 12, 18]
    assert len(plan.batches) == 18
    orders = [[x for ids, _ in plan.batches[end - 6 : end] for x in ids] for end in setup.ends]
    assert all(sorted(order) == sorted(drawn(setup).ids) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_an_epoch_whose_last_batch_is_smaller_ends_where_it_ends() -> None:
    args = {**TINY, "sequences": 22}
    assert TreebankSetup(**args).ends == [6, 12, 18]
    assert [len(ids) for ids, _ in recipe(**args).batches[5::6]] == [2, 2, 2]


def test_ids_tokens_and_texts_belong_together() -> None:
    setup = TreebankSetup(**TINY)
    actual, every = drawn(setup), made_up().train.replace("\n", " <eos> ").split()
    known = set(actual.tokenizer.known)
    for name, row, words in zip(actual.ids, actual.tokens.tolist(), actual.texts, strict=True):
        start = int(name.removeprefix("treebank/train/"))
        assert words.split() == every[start : start + 10]
        assert actual.tokenizer.decode(row) == " ".join(w if w in known else "<unk>" for w in words.split())
    assert len(set(actual.ids)) == 24


def test_the_seed_decides_everything_and_the_net_learns() -> None:
    one, two, other = recipe(**TINY), recipe(**TINY), recipe(**TINY, seed=1)
    assert [ids for ids, _ in one.batches] == [ids for ids, _ in two.batches] != [ids for ids, _ in other.batches]
    first = [float(take_step(one, t).mean()) for t in range(18)]
    again, terms = [float(take_step(two, t).mean()) for t in range(18)], 18 * (16 + 64 + 30 + 4 * 9)
    assert_same(torch.tensor(first), torch.tensor(again), terms)  # width, inner width, words, tokens of a batch
    assert first[-1] < first[0]


def test_positions_for_each_sequence_change_no_logit() -> None:
    plan = recipe(**TINY)
    plain = GPT(vocabulary=30, length=9, layers=1, width=16, heads=4)
    plain.load_state_dict(plan.model.state_dict())
    tokens = plan.queries["valid"]
    torch.testing.assert_close(plan.model(tokens[:, :-1]), plain(tokens[:, :-1]))
    assert torch.allclose(per_word(plan.model, tokens) * 9, plan.loss(plan.model, tokens))


def test_queries_are_of_the_validation_text_and_shown_as_words() -> None:
    plan = recipe(**TINY)
    assert plan.page.show is not None
    first = plan.page.show(plan.queries["valid"])[0]["text"].split()
    assert [w for w in first if w != "<unk>"] == [
        w for w in made_up().valid.replace("\n", " <eos> ").split()[:10] if "rare" not in w
    ]
    assert shown(torch.tensor([[0, 1]]), Words(("x", "y"))) == [{"text": "x y"}]


def test_more_sequences_than_the_treebank_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"sequences must be at most 53.*got 1,000"):
        drawn(TreebankSetup(**{**TINY, "sequences": 1000}))
