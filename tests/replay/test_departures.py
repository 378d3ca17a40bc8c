"""Where a replay leaves the run: the right step, the right words, and on from the next checkpoint."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import augmented, examples
from tests.support.rounding import NoisyRounding
from torch import Tensor, nn

import backstory
from backstory import Recipe
from backstory.capture.randomness import own_randomness
from backstory.errors import MismatchError
from backstory.exact.reverse import check_replay
from backstory.replay.reproduction import Reproduction, reproduction
from backstory.store import RunStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """Checkpoints at 0, 3, 5 and 8, losses of every step."""
    path = tmp_path_factory.mktemp("departures") / "run"
    with own_randomness():
        augmented.trained(path)
    return RunStore.open(path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """Neither checkpoints nor losses."""
    path = tmp_path_factory.mktemp("departures") / "bare"
    with own_randomness():
        augmented.trained(path, checkpoints=None, losses=False)
    return RunStore.open(path)


def test_a_run_with_draws_is_met_at_every_step(run: RunStore, bare: RunStore) -> None:
    for store in (run, bare):
        actual = reproduction(store, augmented.make)
        assert actual, str(actual)
        assert actual.steps == 8
    with NoisyRounding():
        actual = reproduction(run, augmented.make)
    assert actual, str(actual)
    assert (actual.steps, actual.lost) == (8, ())


class From(Sequence[Any]):
    """Batches that are changed from step 4 on."""

    def __init__(self, batches: Sequence[Any], change: Callable[[Any, Any, Tensor], Any]) -> None:
        self._batches, self._change = batches, change

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, t: Any) -> Any:
        ids, (x, y) = self._batches[t]
        return self._change(ids, x, y) if t >= 4 else (ids, (x, y))


def changed(change: Callable[[Any, Any, Tensor], Any]) -> Recipe:
    made = augmented.make()
    return dataclasses.replace(made, batches=From(made.batches, change))


def other_batch(ids: Any, x: Tensor, y: Tensor) -> Any:
    return ids, (x * (1 + 1e-9), y)


def other_places(ids: Any, x: Tensor, y: Tensor) -> Any:
    return ids, (x.flip(0), y.flip(0))


def other_draws() -> Recipe:
    """Another mask: from step 4 on one more number is drawn before it."""
    made = changed(lambda ids, x, y: (ids, (x, y, None)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if len(batch) > 2:
            torch.rand(1)
        return examples.loss(model, batch)

    return dataclasses.replace(made, loss=loss)


def never_the_same() -> Recipe:
    draws = torch.Generator()
    draws.seed()
    return dataclasses.replace(
        augmented.make(), loss=lambda m, b: examples.loss(m, b) * (1 + torch.rand(1, generator=draws))
    )


def other_labels(ids: Any, x: Tensor, y: Tensor) -> Any:
    return ids, (x, 1 - y)


DATA = "the data or their order differ"
WRONG: dict[str, tuple[Callable[[], Recipe], int, str]] = {
    "order": (partial(augmented.make, order=[0, 1, 2, 3, 5, 4, 6, 7]), 4, "the recipe has sample"),
    "batch": (partial(changed, other_batch), 4, DATA),
    "places": (partial(changed, other_places), 4, DATA),
    "labels": (partial(changed, other_labels), 4, "the loss of its samples has a relative error"),
    "draws": (other_draws, 4, "rounding explains"),
    "itself": (never_the_same, 0, "the recipe does not repeat itself"),
    "decay": (partial(augmented.make, decay=0.2), 0, "weight decay is 0.2 in the recipe, and was 0.3 in the run"),
    "dropout": (partial(augmented.make, dropout=0.3), 0, "rounding explains"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_recipe_is_refused_with_the_step(which: str, run: RunStore, bare: RunStore) -> None:
    recipe, step, words = WRONG[which]
    for store in (run, bare):
        actual = reproduction(store, recipe)
        assert not actual
        assert [x.step for x in actual.left] == [step], str(actual)
        if which != "labels" or store is run:
            assert words in str(actual)
        assert ("steps 0 to 3 agree" if step else "no earlier step agrees") in str(actual)
        with pytest.raises(MismatchError, match=rf"(?s)at step {step}: .*pass check=False"):
            check_replay(store, recipe, None, 8)


def test_it_goes_on_from_the_next_checkpoint(run: RunStore, bare: RunStore) -> None:
    """From step 4 on every step differs: up to the checkpoint at step 5, and from there on again."""
    actual = reproduction(run, WRONG["batch"][0], stop=False)
    assert [(x.step, x.until) for x in actual.left] == [(4, 5), (5, None)]
    assert "from the checkpoint at step 5 on it starts anew, and leaves the run 1 more times" in str(actual)
    assert check_replay(run, WRONG["batch"][0], None, 8, check=False) == str(actual)
    assert [(x.step, x.until) for x in reproduction(bare, WRONG["batch"][0], stop=False).left] == [(4, None)]
    assert "could not be compared" in check_replay(run, partial(augmented.make, order=range(3)), None, 8, check=False)


def test_one_wrong_step_is_left_behind(run: RunStore) -> None:
    def once() -> Recipe:
        made = augmented.make()

        def only(ids: Any, x: Tensor, y: Tensor) -> Any:
            return ids, (x + (ids == made.batches[4][0]), y)

        return dataclasses.replace(made, batches=From(made.batches, only))

    actual = reproduction(run, once, stop=False)
    assert [(x.step, x.until) for x in actual.left] == [(4, 5)]
    assert 8 in actual.near + actual.same, "the end is met again"


def test_exact_results_tell_where_the_replay_left(run: RunStore) -> None:
    made = backstory.open(run.path)
    with pytest.raises(MismatchError, match="at step 4"):
        made.exact("q", WRONG["labels"][0])
    result = made.exact("q", WRONG["labels"][0], check=False)
    assert (
        "the replay differs from the run at step 4: the loss of its samples has a relative error" in result.caveats[0]
    )
    assert "from the checkpoint at step 5 on it starts anew" in result.caveats[0]


def test_another_call_of_the_model_is_no_other_data(run: RunStore, bare: RunStore) -> None:
    """Where losses of all samples are met; where there are none, it cannot be told from another order of a batch."""

    def spread() -> Recipe:
        made = augmented.make()

        def loss(model: nn.Module, batch: Any) -> Tensor:
            assert isinstance(model, nn.Sequential)
            x: Tensor = batch[0]
            handle = model.register_forward_pre_hook(lambda m, args: (x,))
            try:
                return nn.functional.cross_entropy(model(x.clone() + 1), batch[1], reduction="none")
            finally:
                handle.remove()

        return dataclasses.replace(made, loss=loss)

    assert reproduction(run, spread)
    actual = reproduction(bare, spread)
    assert [x.step for x in actual.left] == [0]
    assert "or the recipe's loss calls the model with other tensors" in str(actual)


class Logistic(nn.Module):
    """Weights that a step of SGD takes to 3.9 w (1 − w) each: chaos, in which every step loses a bit."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(1, 64, bias=False, dtype=torch.float32)
        with torch.no_grad():
            self.map.weight.copy_(torch.linspace(0.2, 0.8, 64)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.map(x)
        return out


def chaotic(scale: float = 1.0) -> Recipe:
    model = Logistic()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        w: Tensor = m(x)
        return scale * (w.square() * -1.45 + w.pow(3) * 1.3).sum(1)  # w − loss' = 3.9 w − 3.9 w²

    batches = [([t], torch.ones(1, 1)) for t in range(60)]
    return Recipe(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loss=loss, batches=batches)


def record_chaos(path: Path) -> RunStore:
    made = chaotic()
    with backstory.record(
        made.model, made.optimizer, path, loss_reduction="mean", projection="full", steps=60, checkpoints=1
    ) as rec:
        for ids, x in made.batches:
            made.optimizer.zero_grad()
            with rec.step(ids) as s:
                each = made.loss(made.model, x)
                s.losses(each)
                each.mean().backward()
                made.optimizer.step()
    return RunStore.open(path)


def test_where_rounding_takes_half_of_the_digits_nothing_can_be_told(tmp_path: Path) -> None:
    store = record_chaos(tmp_path / "run")

    def rounded() -> Recipe:
        return dataclasses.replace(chaotic(), loss=lambda m, x: ((w := m(x)) * w * (w * 1.3 - 1.45)).sum(1))

    actual = reproduction(store, rounded)
    assert actual, str(actual)
    assert [hi for _, hi in actual.lost] == [30, 60]
    assert 5 < actual.lost[0][0] < 28, "every step loses about a bit, of 24"
    assert "Training is chaotic in steps" in str(actual)
    wrong = reproduction(store, partial(chaotic, 1.001))
    assert [x.step for x in wrong.left] == [0], "before chaos sets in, another recipe is seen"


def test_a_reproduction_is_true_where_something_was_compared() -> None:
    assert not Reproduction()
    assert Reproduction(steps=1)
    assert not Reproduction(steps=1, undecided=(3,))
