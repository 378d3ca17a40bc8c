"""The set-ups are what they say, and come from the seed alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from experiments.data.images import last_epoch, net, recipe, removals, setup_of, split

from backstory.errors import UsageError
from backstory.replay.tape import index, places

TINY = setup_of("tiny", "gelu", "sgd", 2, 50)  # a last batch of 2


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
        place = {int(i): k for k, i in enumerate(split(TINY, seed)[0])}
        return [place[int(i)] for ids, _ in recipe(TINY, seed).batches for i in ids]

    assert order(3) != order(4)
    assert order(3)[:50] != order(3)[50:]
    assert sorted(order(3)[:50]) == sorted(order(3)[50:]) == list(range(50))


def test_a_recipe_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    recipe(TINY, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_queries_and_training_images_are_different_images() -> None:
    """Training images come from one half of the digits, queries from the other: numbers may be equal, images are not."""
    train, asked = split(TINY, 0)
    assert (len(train), len(asked)) == (50, 40)
    made = recipe(TINY, 0)
    trained = {tuple(x.flatten().tolist()) for _, (inputs, _) in made.batches for x in inputs}
    assert len(trained) == 50
    assert not trained & {tuple(x.flatten().tolist()) for x in made.queries["test"][0]}


def test_single_removals_are_from_the_last_epoch_and_all_from_all() -> None:
    single, every = removals(TINY, 0, 6)
    steps = last_epoch(TINY)
    made = recipe(TINY, 0)
    assert steps == (4, 5, 6, 7)
    assert len(made.batches) == 8
    for one, whole in zip(single, every, strict=True):
        assert one.samples == whole.samples
        occurrences = index([made.batches[t][0] for t in range(8)])
        assert sum(map(len, places(one, occurrences).values())) == 1
        assert sum(map(len, places(whole, occurrences).values())) == 2


def test_the_papers_nets_have_the_papers_layers() -> None:
    def size(model: str, activation: str) -> int:
        return sum(p.numel() for p in net(setup_of(model, activation, "sgd"), 28, 0).parameters())

    assert size("mlp", "gelu") == 784 * 64 + 64 + 64 * 10 + 10
    assert size("mlp", "relu") == 784 * 128 + 128 + 128 * 10 + 10
    assert size("cnn", "relu") == size("cnn", "gelu") == 32 * 9 + 32 + 64 * 32 * 9 + 64 + 64 * 49 * 10 + 10


def test_epochs_and_images_are_the_papers_unless_given() -> None:
    assert [setup_of(m, "relu", "sgd").epochs for m in ("mlp", "cnn")] == [3, 10]
    assert setup_of("mlp", "relu", "adamw").images == 6000
    given = setup_of("cnn", "relu", "adamw", 2, 300)
    assert (given.epochs, given.images, given.optimizer) == (2, 300, "adamw")


@pytest.mark.parametrize(
    ("optimizer", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.05, "momentum": 0.0}),
        ("momentum", torch.optim.SGD, {"lr": pytest.approx(0.005), "momentum": 0.9, "dampening": 0.0}),
        ("adamw", torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}),
    ],
)
def test_the_recipe_has_the_optimizer(optimizer: str, kind: type, settings: dict[str, Any]) -> None:
    made = recipe(replace(TINY, optimizer=optimizer), 0).optimizer
    assert type(made) is kind
    assert {name: made.param_groups[0][name] for name in settings} == settings


def test_the_optimizer_changes_nothing_that_is_drawn() -> None:
    a, b = (recipe(replace(TINY, optimizer=name), 0) for name in ("sgd", "adamw"))
    assert [ids for ids, _ in a.batches] == [ids for ids, _ in b.batches]
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


def test_wrong_arguments_say_what_is_expected() -> None:
    with pytest.raises(UsageError, match="model must be one of mlp, cnn, tiny, got 'nothing'"):
        setup_of("nothing", "relu", "sgd")
    with pytest.raises(UsageError, match="must be one of gelu, relu"):
        setup_of("mlp", "tanh", "sgd")
    with pytest.raises(UsageError, match="must be one of sgd, momentum, adamw"):
        setup_of("mlp", "relu", "lion")
    with pytest.raises(UsageError, match="between 2 and 50"):
        removals(TINY, 0, 51)
    with pytest.raises(UsageError, match="has only 898"):
        recipe(replace(TINY, images=1790), 0)
