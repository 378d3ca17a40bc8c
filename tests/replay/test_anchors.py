"""A replay that follows a recording, against the training itself."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from tests.support import augmented, examples
from tests.support.oracles import assert_same

from backstory import Recipe
from backstory.capture.randomness import checksums, generators
from backstory.errors import MismatchError, UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet, losses
from backstory.exact.reverse import reverse
from backstory.exact.tangent import Group, tangent
from backstory.replay.anchors import Anchors, Fetched
from backstory.replay.tape import Removal, Tape, own_randomness
from backstory.store import RunStore


@pytest.fixture(scope="module", params=[2, None], ids=["checkpoints", "none"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, Recipe]:
    path = tmp_path_factory.mktemp("anchored") / "run"
    with own_randomness():
        made = augmented.trained(path, checkpoints=request.param)
    return RunStore.open(path), made


def test_dropout_and_augmentation_are_replayed_from_the_recording(run: tuple[RunStore, Recipe]) -> None:
    """The recipe has another seed and constant rates: both are the recording's."""
    store, trained = run
    before = checksums(generators())
    with own_randomness():
        random.seed(3)
        np.random.seed(3)
        tape = Tape(augmented.make, run=store)
        tape.let_go(0)
        tape.record([0, 5])
        examples.assert_replayed(tape.recipe, trained)
        for start in (5, 0):
            for t in range(tape.rewind(start), tape.length):
                tape.step(t)
            examples.assert_replayed(tape.recipe, trained)
    assert checksums(generators()) == before
    with own_randomness():
        alone = Tape(augmented.make)
        alone.record(())
    first, second = (next(iter(x.model.parameters())) for x in (alone.recipe, trained))
    assert float((first - second).detach().abs().max()) > 1e-3, "without the recording it is another training"


def test_a_replay_from_each_checkpoint_ends_where_the_run_did(run: tuple[RunStore, Recipe]) -> None:
    store, trained = run
    for start in store.restarts():
        with own_randomness():
            tape = Tape(augmented.make, run=store)
            with torch.no_grad():
                for p in tape.parameters:
                    p.add_(0.01)  # the replay has left the run
            tape.anchored = {start}
            tape.record(())
        if start:
            examples.assert_replayed(tape.recipe, trained)
        else:  # it began before the weights were moved
            first, second = (next(iter(x.model.parameters())) for x in (tape.recipe, trained))
            assert float((first - second).detach().abs().max()) > 1e-3
    assert store.restarts() == ([] if "checkpoint-00000003" not in store.tensor_names() else [0, 3, 5, 8])


def test_in_another_precision_the_checkpoints_are_cast(run: tuple[RunStore, Recipe]) -> None:
    store, trained = run
    with own_randomness():
        tape = Tape(augmented.make, run=store, dtype=torch.float32)
        tape.record(())
    for a, b in zip(tape.recipe.model.parameters(), trained.model.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert_same(a.double(), b.double(), examples.TERMS, size=1.0, dtype=torch.float32)


def test_exact_results_follow_the_recording(run: tuple[RunStore, Recipe]) -> None:
    """Reverse, tangents and a finite difference by leaving out a little, all through one recorded run."""
    store, _ = run
    query = QuerySet("q", mean=True)
    scores = reverse(augmented.make, query, run=store).scores[0]
    again = reverse(augmented.make, query, run=store, segments=3).scores[0]
    assert_same(again, scores, 3 * examples.TERMS, size=1.0)
    groups = [Group({0: [1]}), Group({t: list(range(4)) for t in range(8)})]
    theta = tangent(augmented.make, groups, run=store)[8]
    with own_randomness():
        tape = Tape(augmented.make, run=store)
        tape.record(())
        tape.recipe.model.eval()
        value = losses_of(tape.recipe)
        v = torch.cat([g.flatten() for g in torch.autograd.grad(value, tape.parameters)])
    assert_same(theta @ v, torch.stack([scores[1], scores.sum()]), 10 * examples.TERMS, size=1.0)
    h = 1e-5
    sample = store.occurrences(2)[0][1]
    low, high = (leave_out(augmented.make, [Removal((int(sample),), (0,), s)], query, run=store) for s in (h, -h))
    assert float((low - high)[0, 0]) / (2 * h) == pytest.approx(float(scores[1]), rel=1e-4, abs=1e-9)


def losses_of(recipe: Recipe) -> torch.Tensor:
    return recipe.loss(recipe.model, recipe.queries["q"]).mean()


def test_what_is_left_out_is_not_put_back_by_a_checkpoint(run: tuple[RunStore, Recipe]) -> None:
    store, _ = run
    sample = int(store.occurrences(2)[0][1])
    removals = [Removal((sample,), (0,)), Removal((sample,))]
    actual = leave_out(augmented.make, removals, "q", run=store, vectorised=False)
    with own_randomness():
        tape = Tape(augmented.make, run=store)
        tape.anchored = {0} & tape.anchored
        tape.record([0])
        base = losses(tape.recipe, "q")
        tape.rewind(0)
        for t in range(8):
            w = torch.full((4,), 0.25, dtype=torch.float64)
            if t == 0:
                w[1] = 0
            tape.step(t, w)
        expected = losses(tape.recipe, "q") - base
    assert float(actual.abs().min()) > 1e-6
    assert_same(actual[0], expected, examples.TERMS, size=1.0)


def test_a_batch_is_fetched_once_with_its_own_states() -> None:
    fetched: list[int] = []

    class Drawing(list[int]):
        def __getitem__(self, t: object) -> object:  # type: ignore[override]
            fetched.append(int(str(t)))
            return [t], torch.rand(1)

    with own_randomness():
        states = {0: copy.copy(generators())}
        first = torch.rand(1)
        batches = Fetched(Drawing([0, 1]), states.get)  # type: ignore[arg-type]
        before = checksums(generators())
        assert batches[0][1] == first
        assert batches[0][1] == first
        batches[1]
        batches[1]
        assert checksums(generators()) == before
    assert fetched == [0, 1, 1], "one whose states are not known is not kept"


def test_a_recipe_of_another_shape_is_refused(run: tuple[RunStore, Recipe]) -> None:
    def one_group() -> Recipe:
        made = augmented.make()
        parameters = [p for g in made.optimizer.param_groups for p in g["params"]]
        return Recipe(model=made.model, optimizer=torch.optim.AdamW(parameters), loss=made.loss, batches=made.batches)

    with own_randomness():
        with pytest.raises(MismatchError, match="1 parameter groups, but the run was trained with 2"):
            Tape(one_group, run=run[0])
        with pytest.raises(UsageError, match="5 steps, but the run has 8"):
            Tape(partial(augmented.make, order=range(5)), run=run[0])


class Halved(torch.optim.SGD):
    """Its steps are half as long as its learning rate says."""


def test_rates_of_other_optimizers_are_the_recipes(run: tuple[RunStore, Recipe]) -> None:
    store, made = run
    groups = [{"params": group["params"], "lr": 7.0} for group in made.optimizer.param_groups]
    for kind, expected in ((Halved, 7.0), (torch.optim.SGD, float(store.steps().groups["rate"][0, 0]))):
        optimizer = kind(groups)
        Anchors(store, optimizer, store.n_steps()).set_rates(0, optimizer)
        assert optimizer.param_groups[0]["lr"] == expected
