"""Variants of a run, plain and stacked, against ordinary loops: what is left out, what the others weigh, empty steps, twins."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import UsageError
from backstory.exact import variants
from backstory.exact.variants import MOST, Variant, at_once, check_choices, obstacle, stacks, train_variants
from backstory.replay import update
from backstory.replay.tape import Tape

GONE = {1: [0, 2], 3: [0, 1, 2, 3], 4: [1]}  # step 3 is left empty
AT = (2, 5, 8)


def by_hand(recipe: Recipe, others: str, empty: str, gone: dict[int, list[int]] | None = None) -> dict[int, Tensor]:
    """θ before the steps `AT` without what is gone, by an ordinary loop."""
    out = {}
    for t, (ids, batch) in enumerate(recipe.batches):
        if t in AT:
            out[t] = weights(recipe)
        left = [i for i in range(len(ids)) if i not in (GONE if gone is None else gone).get(t, [])]
        if left or empty == "coast":
            recipe.optimizer.zero_grad()
            total = recipe.loss(recipe.model, batch)[left].sum() / (
                len(left) if others == "renormalise" and left else len(ids)
            )
            total.backward()
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(recipe.model.parameters(), recipe.clip_norm)
            recipe.optimizer.step()
        if recipe.schedule is not None:
            recipe.schedule.step()
    return {**out, len(recipe.batches): weights(recipe)}


def weights(recipe: Recipe) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in recipe.model.parameters()])


def trained(fresh: Callable[[], Recipe], those: list[Variant], vectorised: bool) -> list[dict[int, Tensor]]:
    tape, out = Tape(fresh), list[dict[int, Tensor]](dict() for _ in those)
    tape.record([0])
    for stack in stacks(tape, those, vectorised):
        train_variants(
            tape,
            [those[i] for i in stack],
            AT,
            lambda r, t, of=stack: out[of[r]].update({t: weights(tape.recipe)}),  # type: ignore[misc]
        )
    return out


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_choices_equal_an_ordinary_loop(kind: str) -> None:
    fresh = partial(examples.make, kind, schedule=True)
    choices = [(others, empty) for others in variants.OTHERS for empty in variants.EMPTY]
    those = [Variant(GONE, others=others, empty=empty) for others, empty in choices]
    last = []
    for vectorised in (False, True):
        actual = trained(fresh, those, vectorised)
        for choice, one in zip(choices, actual, strict=True):
            for t, expected in by_hand(fresh(), *choice).items():
                assert_same(one[t], expected, examples.TERMS, size=1.0)
            last.append(one[8])
    assert all(float((a - b).abs().max()) > 1e-4 for k, a in enumerate(last[:4]) for b in last[:k])


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_parameter_without_a_gradient_in_some_step_stays_as_it_is(kind: str) -> None:
    """As torch's optimizers do it: no decay, no momentum, no count of steps."""
    fresh = partial(examples.sometimes, kind)
    those = [Variant({1: [k]}) for k in range(4)]
    for vectorised in (False, True):
        for k, one in enumerate(trained(fresh, those, vectorised)):
            for t, expected in by_hand(fresh(), "keep", "coast", {1: [k]}).items():
                assert_same(one[t], expected, examples.TERMS, size=1.0)


def test_what_skips_steps_is_not_stacked() -> None:
    tape = Tape(examples.make)
    tape.record([0])
    those = [Variant(GONE), Variant(GONE, empty="skip"), Variant({1: [0]}, empty="skip"), Variant({0: [1]})]
    assert list(stacks(tape, those, True)) == [[3, 0, 2], [1]]


def test_token_means_are_renormalised_by_tokens() -> None:
    def fresh() -> Recipe:
        recipe = examples.make()
        return replace(recipe, loss_reduction="token-mean", tokens=lambda batch: torch.tensor([3, 1, 4, 2]))

    tape = Tape(fresh)
    actual = Variant({2: [1, 2]}, others="renormalise").weights(tape, 2)
    assert actual.tolist() == pytest.approx([1 / 5, 0, 0, 1 / 5])
    assert Variant({2: [1, 2]}).weights(tape, 2).tolist() == pytest.approx([1 / 10, 0, 0, 1 / 10])


def test_a_step_whose_others_have_no_tokens_is_left_as_it_is() -> None:
    def fresh() -> Recipe:
        return replace(examples.make(), loss_reduction="token-mean", tokens=lambda batch: torch.tensor([3, 0, 0, 0]))

    actual = Variant({2: [0]}, others="renormalise").weights(Tape(fresh), 2)
    assert actual.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


def test_twins_start_one_rounding_unit_away_each_in_its_own_way() -> None:
    fresh = partial(examples.make, "momentum")
    twins = [Variant(twin=k) for k in range(3)]
    for vectorised in (False, True):
        ends = [one[8] for one in trained(fresh, twins, vectorised)]
        base = by_hand(fresh(), "keep", "coast", {})[8]
        apart = [float((x - base).abs().max()) for x in ends]
        assert all(0 < x < 1e-12 for x in apart)
        assert float((ends[0] - ends[1]).abs().max()) > 0


@pytest.mark.parametrize("vectorised", [False, True])
def test_twins_of_weights_that_begin_at_zero_step_aside_after_the_first_update(vectorised: bool) -> None:
    def fresh() -> Recipe:
        model = nn.Linear(3, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return with_model(model)

    base = by_hand(fresh(), "keep", "coast", {})
    for one in trained(fresh, [Variant(twin=k) for k in range(2)], vectorised):
        apart = [float((one[t] - base[t]).abs().max()) for t in AT]
        assert 0 < max(apart) < 1e-12, "rounding may be gone at the end: the problem is convex"


def test_choices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="others must be one of 'keep', 'renormalise'"):
        check_choices("scale", "coast", "mean")
    with pytest.raises(UsageError, match="empty must be one of 'coast', 'skip'"):
        check_choices("keep", "stop", "mean")
    with pytest.raises(UsageError, match="sums its losses"):
        check_choices("renormalise", "coast", "sum")
    with pytest.raises(UsageError, match="what the loss is a mean over"):
        check_choices("renormalise", "coast", "weights")
    check_choices("renormalise", "skip", "token-mean")


def recorded(recipe: Recipe) -> Tape:
    tape = Tape(lambda: recipe)
    tape.record([0])
    tape.rewind(0)
    return tape


def with_model(model: nn.Module) -> Recipe:
    return replace(examples.make(), model=model.double(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_batch_norm_is_not_stacked() -> None:
    tape = recorded(with_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))))
    assert "torch.func" in (obstacle(tape, Variant({0: [1]}), 0) or "")


def test_an_error_without_a_message_is_an_obstacle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(variants, "Replicas", fail)
    assert "NotImplementedError" in (obstacle(recorded(examples.make()), Variant({0: [1]}), 0) or "")


def test_layer_norm_and_tied_weights_are_stacked() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    assert obstacle(recorded(with_model(model)), Variant({0: [1]}), 0) is None


def test_a_wrong_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = recorded(examples.make("momentum"))
    right = update.update

    def wrong(now, grads, steps, max_norm, lead=0):  # type: ignore[no-untyped-def]
        return right(now, grads, [c._replace(mu=0.5) for c in steps], max_norm, lead)

    monkeypatch.setattr(update, "update", wrong)
    assert "differ" in (obstacle(tape, Variant({0: [1]}), 0) or "")


def test_bounds_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = recorded(examples.make())
    assert at_once(tape) == MOST
    size = sum(p.numel() for p in tape.parameters) * 8
    monkeypatch.setattr(variants, "STACK_BYTES", 5 * size)
    assert at_once(tape) == 5
    monkeypatch.setattr(variants, "SAVED_BYTES", 1)
    assert at_once(tape) == 1


def test_a_step_that_is_mostly_arithmetic_is_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack saves the overhead of small operations, and costs where there is little of it."""
    tape = Tape(examples.make)
    tape.record((0,))
    many = [Variant({t: [0]}) for t in range(6)]
    assert [len(x) for x in variants.stacks(tape, many)] == [6]
    monkeypatch.setattr(variants, "WORTH_BYTES", variants._saved_bytes(tape) - 1)
    assert [len(x) for x in variants.stacks(tape, many)] == [1] * 6
    assert [len(x) for x in variants.stacks(tape, many, True)] == [6], "where it is asked for, it is done all the same"
