"""Everything about a run of the GPT study comes from its seed; here on made-up text."""

from collections.abc import Iterator

import pytest
import torch
from experiments.gpt.setups import DOMAINS, GptSetup, domain_losses, draw, recipe, removals, setup_named
from tests.support.oracles import assert_same
from torch import Tensor

from backstory.demo.data import Document
from backstory.demo.gpt_model import counts, loss
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe, take_step, weights
from experiments.gpt import setups as gpt_setups

TINY = GptSetup(steps=6, batch_size=4, length=12, layers=1, width=16, queries=2, pretraining=0, rate=1e-2)


def made_up(sources: object = None, limit: int = 0) -> list[Document]:
    """Four domains, each with its own letters: stands in for `corpus`."""
    out = []
    for k, source in enumerate(DOMAINS):
        letters = torch.randint(6, (400,), generator=torch.Generator().manual_seed(k)) + 97 + 5 * k
        out.append(Document("0", source, "".join(chr(int(x)) for x in letters)))
    return out


def without_network() -> Iterator[None]:
    """`corpus` made up, and nothing remembered before or after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_setups, "corpus", made_up)
        _forget()
        yield
    _forget()


def _forget() -> None:
    for remembered in (gpt_setups._sequences, gpt_setups.draw, gpt_setups._pretrained):
        remembered.cache_clear()


text = pytest.fixture(autouse=True)(without_network)


def test_no_sequence_is_used_twice() -> None:
    drawn = draw(GptSetup(**{**vars(TINY), "pretraining": 3}), 0)
    used = torch.cat([drawn.pretraining, drawn.training, drawn.queries.flatten(0, 1)])
    assert [len(drawn.pretraining), len(drawn.training), *drawn.queries.shape] == [12, 24, 4, 2, 13]
    assert len(used.unique(dim=0)) == len(used)
    assert len(set(drawn.ids)) == 24


def test_each_query_domain_has_its_own_text() -> None:
    for k, tokens in enumerate(draw(TINY, 0).queries):
        assert tokens.min() >= 97 + 5 * k
        assert tokens.max() < 97 + 5 * k + 6


def losses_after(made: Recipe, queries: Tensor) -> Tensor:
    with torch.no_grad():
        return domain_losses(made.model, queries)


def assert_trained_alike(a: Recipe, b: Recipe) -> None:
    """By their losses: Adam takes a whole step on a gradient that is 0 but for rounding, so that weights may differ."""
    queries = draw(TINY, 0).queries
    terms = TINY.steps * (16 + 64 + 256 + 4 * 12)  # width, inner width, vocabulary, tokens of a batch
    assert_same(losses_after(a, queries), losses_after(b, queries), terms)


def test_a_seed_gives_the_same_run_again_and_another_gives_another() -> None:
    ends = []
    for seed in (0, 0, 1):
        made = recipe(TINY, seed)
        for t in range(TINY.steps):
            take_step(made, t)
        ends.append(made)
    assert_trained_alike(ends[0], ends[1])
    queries = draw(TINY, 0).queries
    assert float((losses_after(ends[0], queries) - losses_after(ends[2], queries)).abs().max()) > 1e-2
    assert removals(TINY, 0, 5) == removals(TINY, 0, 5) != removals(TINY, 1, 5)


def test_the_loss_of_a_step_is_the_mean_over_its_tokens() -> None:
    made = recipe(TINY, 0)
    tokens = made.batches[0][1]
    logits = made.model(tokens[:, :-1])
    mean = -logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).mean()
    assert (loss(made.model, tokens) * weights(made, 0)).sum().item() == pytest.approx(mean.item(), rel=1e-5)
    assert counts(tokens).tolist() == [12] * 4


def test_a_query_is_the_mean_loss_of_one_domain() -> None:
    made = recipe(TINY, 0)
    queries = made.queries["domains"]
    each = [loss(made.model, tokens).sum().item() / (2 * 12) for tokens in queries]
    assert domain_losses(made.model, queries).tolist() == pytest.approx(each, rel=1e-5)


def test_fine_tuning_begins_from_trained_weights() -> None:
    before = recipe(TINY, 0)
    after = recipe(GptSetup(**{**vars(TINY), "pretraining": 8}), 0)
    actual = [domain_losses(r.model, r.queries["domains"]).mean().item() for r in (before, after)]
    assert actual[1] < actual[0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="finetune, scratch"):
        setup_named("other")
    with pytest.raises(UsageError, match="between 2 and 24"):
        removals(TINY, 0, 25)
    with pytest.raises(UsageError, match="take fewer steps"):
        draw(GptSetup(**{**vars(TINY), "steps": 1000}), 0)
