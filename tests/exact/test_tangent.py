"""Tangents, against central differences of whole runs with torch's own optimizer, and against the reverse sweep."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.exact.test_reverse import CAUSES, language
from tests.support import augmented, examples
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import NumericalError, UnsupportedError, UsageError
from backstory.exact.reverse import reverse
from backstory.exact.tangent import Group, Tangents, tangent
from backstory.replay.tape import Tape, own_randomness
from backstory.store import RunStore
from backstory.store.batches import MicroBatches

D = torch.float64
CLIP = 0.15
GROUPS = [Group({0: [1]}), Group({2: [0, 3], 5: [1]}), Group({7: [2]}), Group({0: [0], 1: [0, 1, 2, 3], 4: [3, 1]})]


def weights(recipe: Recipe) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for g in recipe.optimizer.param_groups for p in g["params"]])


def trained(fresh: Any, group: Group, eps: float, until: int) -> Tensor:
    """θ after `until` steps, by an ordinary loop."""
    recipe = fresh()
    for t, (ids, batch) in enumerate(recipe.batches[:until]):
        recipe.model.zero_grad()
        factors = torch.ones(len(ids), dtype=D)
        factors[group.out.get(t, [])] -= eps
        total = (recipe.loss(recipe.model, batch) * factors).sum()
        for step, i in group.into.get(t, ()):
            other = recipe.batches[step][1]
            total = total + eps * recipe.loss(recipe.model, tuple(x[i : i + 1] for x in other)).sum()
        (total / len(ids)).backward()
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(recipe.model.parameters(), recipe.clip_norm)
        recipe.optimizer.step()
        if recipe.schedule is not None:
            recipe.schedule.step()
    return weights(recipe)


def difference(fresh: Any, group: Group, until: int = examples.STEPS, h: float = 1e-5) -> Tensor:
    return (trained(fresh, group, h, until) - trained(fresh, group, -h, until)) / (2 * h)


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("kind", examples.KINDS)
def test_equals_differences_of_whole_runs(kind: str, clip: float | None) -> None:
    fresh = partial(examples.make, kind, clip, schedule=True)
    actual = tangent(fresh, GROUPS, [3, 8])
    for i, group in enumerate(GROUPS):
        for t in (3, 8):
            if min(group.out) >= t:
                assert not actual[t][i].any()
            else:
                assert_close(actual[t][i], difference(fresh, group, t), rtol=1e-6, causes=CAUSES)


@pytest.mark.parametrize("kind", examples.KINDS)
def test_the_reverse_sweep_sums_to_it(kind: str) -> None:
    fresh = partial(examples.make, kind, CLIP, dropout=0.4)
    scores = reverse(fresh, "q").scores.reshape(3, examples.STEPS, examples.BATCH)
    last = tangent(fresh, GROUPS)[examples.STEPS]
    recipe = fresh()
    for t in range(examples.STEPS):
        examples_step(recipe, t)
    recipe.model.eval()
    losses = recipe.loss(recipe.model, recipe.queries["q"])
    parameters = [p for g in recipe.optimizer.param_groups for p in g["params"]]
    for q, loss in enumerate(losses):
        v = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
        summed = torch.stack([sum(scores[q, t, gone].sum() for t, gone in g.out.items()) for g in GROUPS])  # type: ignore[misc]
        assert_close(last @ v, summed, rtol=1e-10)


def examples_step(recipe: Recipe, t: int) -> None:
    recipe.optimizer.zero_grad()
    recipe.loss(recipe.model, recipe.batches[t][1]).mean().backward()
    assert recipe.clip_norm is not None
    nn.utils.clip_grad_norm_(recipe.model.parameters(), recipe.clip_norm)
    recipe.optimizer.step()


def test_a_sample_can_come_later() -> None:
    fresh = partial(examples.make, "adamw", CLIP)
    later = Group({1: [2]}, {6: [(1, 2)]})
    actual = tangent(fresh, [later, Group(into={6: [(1, 2)]}), Group({1: [2]})])[examples.STEPS]
    assert_close(actual[0], difference(fresh, later), rtol=1e-6, causes=CAUSES)
    assert_close(actual[0], actual[1] + actual[2], rtol=1e-10)


def test_a_sample_of_a_micro_batch_can_be_moved() -> None:
    plain, groups = partial(examples.make, "adamw", CLIP), [Group(into={6: [(1, 1)]}), Group(into={6: [(1, 3)]})]

    def each(model: nn.Module, batch: MicroBatches) -> Tensor:
        return torch.cat([examples.loss(model, one) for one in batch])

    def accumulated() -> Recipe:
        made = plain()
        batches = [(ids, MicroBatches([(x[:3], y[:3]), (x[3:], y[3:])])) for ids, (x, y) in made.batches]
        return replace(made, batches=batches, loss=each, queries={})

    actual, expected = (tangent(fresh, groups)[examples.STEPS] for fresh in (accumulated, plain))
    assert_close(actual, expected, rtol=1e-10)


def test_a_sample_that_comes_earlier_is_augmented_as_it_was_later(tmp_path: Path) -> None:
    """Against the same run with its augmented batches as they were, in memory."""
    with own_randomness():
        augmented.trained(tmp_path / "run")
        store, batches = RunStore.open(tmp_path / "run"), list[Any]()
        tape = Tape(augmented.make, run=store)
        tape.record((), watch=lambda t: batches.append(tape.recipe.batches[t]) if t < tape.length else None)
    groups = [Group(into={1: [(6, 2)]}), Group(into={6: [(1, 2)]}), Group({3: [0]}, {0: [(3, 0)]})]
    done = list[tuple[int, int]]()
    actual = tangent(augmented.make, groups, [3, 8], run=store, progress=lambda *k: done.append(k))
    expected = tangent(lambda: replace(augmented.make(), batches=batches), groups, [3, 8], run=store)
    for t in (3, 8):
        assert_close(actual[t], expected[t], rtol=1e-10)
    assert done == [(k, 15) for k in range(1, 16)]


def test_a_killed_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, original = partial(examples.make, "adamw", CLIP, dropout=0.4), Tangents.over
    for stop in (1, 4, 7):
        expected, folder, steps = tangent(fresh, GROUPS, [3, 8]), tmp_path / str(stop), list[int]()

        def over(carried: Tangents, t: int, stop: int = stop, steps: list[int] = steps) -> None:
            if len(steps) == stop:
                raise KeyboardInterrupt
            steps.append(t)
            original(carried, t)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Tangents, "over", over)
            tangent(fresh, GROUPS, [3, 8], cache=folder, key="k")
        del steps[:]
        with monkeypatch.context() as patch:
            patch.setattr(Tangents, "over", lambda carried, t, over=over: over(carried, t, stop=99))
            actual = tangent(fresh, GROUPS, [3, 8], cache=folder, key="k")
        assert steps == list(range(stop, 8)), "it did not continue where it was"
        for t in (3, 8):
            assert_same(actual[t], expected[t], 3 * examples.TERMS, size=1.0)


def test_attention_and_tied_weights_are_followed() -> None:
    """On query losses: the gradient of attention's key bias is 0, and Adam makes steps of its rounding that no loss feels."""
    groups, h = [Group({0: [1, 2]}), Group({1: [0, 3], 3: [1]})], 1e-6
    model, actual = trained_language(groups[0], 0.0), tangent(language, groups)[4]
    for q, loss in enumerate(language_losses(model)):
        v = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        for i, group in enumerate(groups):
            up, down = (language_losses(trained_language(group, k * h))[q] for k in (1, -1))
            assert_close(actual[i] @ v, (up - down).detach() / (2 * h), rtol=1e-6, causes=CAUSES)


def language_losses(model: nn.Module) -> Tensor:
    recipe = language()
    return recipe.loss(model, recipe.queries["q"])


def trained_language(group: Group, eps: float) -> nn.Module:
    recipe = language()
    for t, (ids, x) in enumerate(recipe.batches):
        recipe.model.zero_grad()
        factors = torch.ones(len(ids), dtype=D)
        factors[group.out.get(t, [])] -= eps
        each = F.cross_entropy(recipe.model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none").mean(1)
        (each * factors).mean().backward()
        nn.utils.clip_grad_norm_(recipe.model.parameters(), 0.5)
        recipe.optimizer.step()
    return recipe.model


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_parameter_without_a_gradient_in_some_step_is_refused(kind: str) -> None:
    """The optimizer leaves it as it is, m, v and decay too; the update with gradient 0 would not."""
    with pytest.raises(NumericalError, match=r"step 3 as differentiated .* every trained parameter"):
        tangent(partial(examples.sometimes, kind), [Group({1: [2]})])


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(UsageError, match="between 0 and 8"):
        tangent(examples.make, GROUPS, [9])

    def amsgrad() -> Recipe:
        recipe = examples.make()
        return replace(recipe, optimizer=torch.optim.AdamW(recipe.model.parameters(), amsgrad=True))

    with pytest.raises(UnsupportedError, match="AMSGrad"):
        tangent(amsgrad, GROUPS)
