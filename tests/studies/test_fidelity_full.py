"""Influences without rows against the adjoint of `maths` over rows that are written out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backstory.maths.adjoint import Adjoint
from backstory.maths.curvature import exact_seeds
from backstory.maths.steps import Coefficients, Gamma, Step
from backstory.session.recipe import Recipe
from backstory.studies.fidelity_full import Replay, corrected, influences, replayed
from backstory.studies.fidelity_setups import SETUPS, Setup, mean_loss, recipe

MLP = replace(SETUPS["tiny"], epochs=2)
CNN = replace(MLP, net="cnn", images=32, activation="relu")


def flat(grads: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in grads])


def rows(made: Recipe, values: Tensor) -> Tensor:
    """One backward pass for each entry."""
    parameters = list(made.model.parameters())
    return torch.stack([flat(torch.autograd.grad(v, parameters, retain_graph=True)) for v in values.reshape(-1)])


def by_rows(replay: Replay, curvature: str, gamma: Gamma) -> Tensor:
    made = replay.recipe
    replay.load(-1)
    adjoint = Adjoint(rows(made, mean_loss(made.model, made.queries["test"])), gamma=gamma)
    found: list[Tensor] = []
    for t in reversed(range(len(made.batches))):
        ids, batch = made.batches[t]
        replay.load(t)
        w = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
        G, V = rows(made, made.loss(made.model, batch)), None
        if curvature == "exact":
            f = made.model(batch[0])
            V = torch.cat([rows(made, (f * s).sum(1)) / len(ids) ** 0.5 for s in exact_seeds(f, "cross-entropy")])
        found.insert(0, adjoint.influence(Step(G, w, Coefficients(replay.rate, 0, 0, 0, 0, 1, 0), V))[0])
    return torch.cat(found)


@pytest.mark.parametrize("setup", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize(
    ("curvature", "form", "gamma"),
    [
        ("empirical", "literal", 0.0),
        ("empirical", "implicit", None),
        ("empirical", "auto", "auto"),
        ("exact", "literal", 0.0),
    ],
)
def test_products_equal_rows(setup: Setup, curvature: str, form: str, gamma: Gamma) -> None:
    setup = replace(setup, rate=0.3)  # so that propagation matters
    replay = replayed(recipe(setup, 0))
    found = influences(replay, curvature, form=form)
    expected = by_rows(replay, curvature, gamma)
    ratio = float((found / expected).median())
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-13), (
        f"median ratio {ratio:.6f}: {setup.batch_size} would mean a missing weight, {1 / setup.rate:g} a missing rate"
    )
    plain = influences(replay, "none")
    assert not torch.allclose(found, plain, rtol=1e-3), "propagation changes nothing here: the test shows nothing"


@pytest.mark.parametrize("setup", [MLP, CNN], ids=["mlp", "cnn"])
def test_the_corrected_removal_follows_the_net_without_the_sample(setup: Setup) -> None:
    """One epoch: nothing to correct, so forward and backward agree."""
    replay = replayed(recipe(replace(setup, epochs=1, rate=0.3), 0))
    names = [int(i) for ids, _ in replay.recipe.batches for i in ids]
    assert torch.allclose(corrected(replay, names), influences(replay, "exact"), rtol=1e-9, atol=1e-13)


def test_a_replay_is_the_same_twice_and_ends_at_its_last_state() -> None:
    a, b = (replayed(recipe(MLP, 1)) for _ in range(2))
    for name, value in a.recipe.model.state_dict().items():
        assert torch.equal(value, b.states[-1][name])
        assert value.dtype == torch.float64
    influences(a, "empirical", form="implicit")
    assert all(torch.equal(v, b.states[-1][n]) for n, v in a.recipe.model.state_dict().items())
