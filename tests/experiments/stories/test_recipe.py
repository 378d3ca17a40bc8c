"""The runs of the fine-tuning come from their seed; here with a small Llama and made-up text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from experiments.data.models import Llama, LlamaShape
from experiments.stories.study import StoriesSetup, loss, mean_loss, pretrained, recipe
from tests.support.oracles import assert_same
from transformers import LlamaConfig, LlamaForCausalLM

from backstory.demo.data import Bytes, Document
from backstory.errors import UsageError
from backstory.replay.recipe import take_step
from experiments.stories import study

TINY: dict[str, Any] = {
    "steps": 12,
    "batch_size": 2,
    "length": 7,
    "queries": 5,
    "domain": "poems",
    "learning_rate": 1e-2,
}
SHAPE = LlamaShape(8, 12, 1, 2, 2, 256, 16, True)
SIZES: Any = asdict(SHAPE)
MAKE: Any = LlamaForCausalLM  # without a type of its own


def small() -> tuple[Llama, Bytes]:
    """A Llama of 256 tokens: stands in for stories15M and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MAKE(LlamaConfig(**SIZES))
    return Llama(SHAPE, {k: v.clone() for k, v in model.state_dict().items()}), Bytes()


def made_up(sources: Sequence[str], limit: int) -> list[Document]:
    """One text of the domain, no two sequences of it alike."""
    letters = torch.randint(26, (480,), generator=torch.Generator().manual_seed(0)) + 97
    return [Document("0", sources[0], "".join(map(chr, letters.tolist())))]


def without_network() -> Iterator[None]:
    """Model and corpus made up, and nothing remembered before or after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "stories15m", small)
        patch.setattr(study, "corpus", made_up)
        study._sequences.cache_clear()
        yield
    study._sequences.cache_clear()


text = pytest.fixture(autouse=True)(without_network)


@pytest.mark.parametrize("passes", [1, 3])
def test_every_pass_is_whole_and_queries_are_other_sequences(passes: int) -> None:
    plan, setup = recipe(**TINY, passes=passes), StoriesSetup(**TINY, passes=passes)
    assert setup.sequences == 24 // passes
    names = [str(x) for ids, _ in plan.batches for x in ids]
    n = setup.sequences
    parts = [names[k * n : (k + 1) * n] for k in range(passes)]
    assert len(names) == 24
    assert all(sorted(part) == sorted(set(parts[0])) for part in parts)
    assert passes == 1 or parts[0] != parts[1]
    used = {tuple(row) for _, tokens in plan.batches for row in tokens.tolist()}
    asked = {tuple(row) for row in plan.queries["unseen"].tolist()}
    assert len(asked) == 5
    assert not used & asked
    assert all(str(x).startswith("poems/0/") for x in names)


def test_both_runs_begin_from_the_same_pretrained_weights_and_learn() -> None:
    one, two = recipe(**TINY, passes=1), recipe(**TINY, passes=3)
    given = small()[0].weights
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, given[name])
        assert torch.equal(value, two.model.state_dict()[name])
    first = [float(take_step(two, t).mean()) for t in range(12)]
    again = recipe(**TINY, passes=3)
    second, terms = [float(take_step(again, t).mean()) for t in range(12)], 12 * (8 + 12 + 256 + 2 * 7)
    assert_same(torch.tensor(first), torch.tensor(second), terms)  # width, inner width, vocabulary, tokens of a batch
    assert first[-1] < first[0]


def test_the_loss_is_the_sum_over_tokens_that_transformers_averages() -> None:
    model, tokens = pretrained(), recipe(**TINY).queries["unseen"]
    theirs = [model(input_ids=x[None], labels=x[None]).loss.item() for x in tokens]
    assert (loss(model, tokens) / 7).tolist() == pytest.approx(theirs, rel=1e-5)
    assert mean_loss(model, tokens).item() == pytest.approx(sum(theirs) / 5, rel=1e-5)


def test_the_rate_warms_up_and_nothing_is_clipped() -> None:
    plan = recipe(**TINY)
    assert plan.clip_norm is None
    take_step(plan, 0)
    assert plan.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


def test_passes_that_are_not_whole_and_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(UsageError, match=r"multiple of passes.*got 12 and 5"):
        recipe(**TINY, passes=5)
    with pytest.raises(UsageError, match="'poems' has 60 sequences, and 200 for training and 5"):
        recipe(**{**TINY, "steps": 100})
