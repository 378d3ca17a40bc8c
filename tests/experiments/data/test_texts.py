"""The runs of the study of sources come from their seed; here on made-up text."""

import pytest
import torch
from experiments.data.passages import QUERIES
from experiments.data.texts import DomainSetup, by_passage, drawn, recipe, removals, setup_named, source_of
from experiments.gpt.setups import domain_losses
from tests.demo.test_texts import HOSTILE
from tests.experiments.data.test_passages import without_network

from backstory.demo.data import Bytes
from backstory.demo.data.typed import text_of
from backstory.errors import UsageError

TINY = DomainSetup(mode="finetune", steps=8, batch_size=6, length=12, layers=1, width=16, pretraining=2)
SOURCES = ["code", "law", "poems"]

text = pytest.fixture(autouse=True)(without_network)


def test_pretraining_training_and_queries_share_no_passage() -> None:
    plan, actual = recipe(TINY, 0), drawn(TINY, 0)
    trained = torch.cat([tokens for _, tokens in plan.batches])
    every = torch.cat([actual.tokens[:12], trained, plan.queries["domains"].flatten(0, 1)])
    assert every.shape == (12 + 48 + 3 * QUERIES, 13)
    assert len(every.unique(dim=0)) == len(every)
    assert torch.equal(plan.queries["domains"][1], plan.queries["law"])


def test_ids_begin_with_the_source_of_their_text() -> None:
    letters = {"law": set("abcdef"), "poems": set("ghijkl"), "code": set("mnopqr")}
    for ids, tokens in recipe(TINY, 1).batches:
        for name, row in zip(ids, tokens, strict=True):
            assert set(text_of(row, Bytes())) - set(HOSTILE) <= letters[source_of(name)]


def test_whole_sources_are_all_passages_and_halves_are_drawn_from_them() -> None:
    gone, used = removals(TINY, 0), [name for ids, _ in recipe(TINY, 0).batches for name in ids]
    assert list(gone["whole"]) == SOURCES
    assert sorted(name for r in gone["whole"].values() for name in r.samples) == sorted(used)
    for source in SOURCES:
        whole, half = gone["whole"][source].samples, gone["half"][source].samples
        assert {source_of(name) for name in whole} == {source}
        assert set(half) < set(whole)
        assert len(half) == len(whole) // 2
    assert removals(TINY, 0) == gone != removals(TINY, 1)
    first = [gone["whole"][s].samples[: len(gone["half"][s].samples)] for s in SOURCES]
    assert first != [gone["half"][s].samples for s in SOURCES]


def test_the_seed_decides_everything_and_fine_tuning_begins_elsewhere() -> None:
    one, two, other = recipe(TINY, 0), recipe(TINY, 0), recipe(TINY, 1)
    weights = [torch.cat([p.flatten() for p in plan.model.parameters()]) for plan in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    scratch = recipe(DomainSetup(steps=8, batch_size=6, length=12, layers=1, width=16), 0)
    queries = one.queries["domains"]
    with torch.no_grad():
        assert domain_losses(one.model, queries).mean() < domain_losses(scratch.model, queries).mean()


def test_a_change_of_tokens_touches_nothing_else() -> None:
    plain, changed = recipe(TINY, 0), recipe(TINY, 0, lambda x: x.flip(1))
    assert [ids for ids, _ in plain.batches] == [ids for ids, _ in changed.batches]
    assert all(torch.equal(a.flip(1), b) for (_, a), (_, b) in zip(plain.batches, changed.batches, strict=True))
    assert torch.equal(plain.queries["domains"], changed.queries["domains"])


def test_the_mean_over_a_domains_passages_is_its_loss() -> None:
    plan = recipe(TINY, 0)
    asked = plan.queries["domains"]
    each = torch.stack([by_passage(plan.model, x).mean() for x in asked])
    torch.testing.assert_close(each, domain_losses(plan.model, asked))


def test_unknown_modes_and_runs_without_a_source_are_refused() -> None:
    assert setup_named("scratch").pretraining == 0
    with pytest.raises(UsageError, match="mode must be one of finetune, scratch"):
        setup_named("some")
    with pytest.raises(UsageError, match="fewer than 2 passages of"):
        removals(DomainSetup(steps=1, batch_size=3, length=12, layers=1, width=16), 0)
