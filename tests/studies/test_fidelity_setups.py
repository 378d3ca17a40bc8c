"""The set-ups are what they say, and come from the seed alone."""

from dataclasses import replace

import pytest
import torch

from backstory.errors import UsageError
from backstory.studies.fidelity_setups import SETUPS, last_epoch, net, recipe, removals, setup_named, split

TINY = replace(SETUPS["tiny"], epochs=2, images=50)  # a last batch of 2


def test_the_seed_decides_everything() -> None:
    a, b, other = recipe(TINY, 3), recipe(TINY, 3), recipe(TINY, 4)
    assert [ids for ids, _ in a.batches] == [ids for ids, _ in b.batches]
    assert [ids for ids, _ in a.batches] != [ids for ids, _ in other.batches]
    for p, q, r in zip(a.model.parameters(), b.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, r)
    assert removals(TINY, 3, 5) == removals(TINY, 3, 5)


def test_the_order_is_drawn_anew_for_each_seed_and_epoch() -> None:
    def order(seed: int) -> list[int]:
        place = {int(i): k for k, i in enumerate(split(TINY, 1797, seed)[0])}
        return [place[int(i)] for ids, _ in recipe(TINY, seed).batches for i in ids]

    assert order(3) != order(4)
    assert order(3)[:50] != order(3)[50:]
    assert sorted(order(3)[:50]) == sorted(order(3)[50:]) == list(range(50))


def test_a_recipe_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    recipe(TINY, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_queries_and_training_images_are_different_images() -> None:
    train, asked = split(TINY, 1797, 0)
    assert not set(train.tolist()) & set(asked.tolist())
    assert (len(train), len(asked)) == (50, 40)


def test_single_removals_are_from_the_last_epoch_and_all_from_all() -> None:
    single, every = removals(TINY, 0, 6)
    steps = last_epoch(TINY)
    made = recipe(TINY, 0)
    assert steps == (4, 5, 6, 7)
    assert len(made.batches) == 8
    for one, whole in zip(single, every, strict=True):
        assert one.samples == whole.samples
        assert sum(len(one.hits(t, made.batches[t][0])) for t in range(8)) == 1
        assert sum(len(whole.hits(t, made.batches[t][0])) for t in range(8)) == 2


def test_the_papers_nets_have_the_papers_layers() -> None:
    sizes = {name: sum(p.numel() for p in net(SETUPS[name], 28, 0).parameters()) for name in SETUPS if name != "tiny"}
    assert sizes["gelu"] == 784 * 64 + 64 + 64 * 10 + 10
    assert sizes["paper-mlp"] == sizes["paper-mlp-10"] == 784 * 128 + 128 + 128 * 10 + 10
    assert sizes["paper-cnn"] == 32 * 9 + 32 + 64 * 32 * 9 + 64 + 64 * 49 * 10 + 10


def test_wrong_arguments_say_what_is_expected() -> None:
    with pytest.raises(UsageError, match="gelu, paper-mlp"):
        setup_named("nothing")
    with pytest.raises(UsageError, match="2 to 50"):
        removals(TINY, 0, 51)
    with pytest.raises(UsageError, match="has 1797 in all"):
        recipe(replace(TINY, images=1790), 0)
