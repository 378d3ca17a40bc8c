"""A recipe is checked before anybody waits for exact results."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import augmented, examples
from torch import Tensor, nn

from backstory import Recipe
from backstory.capture.randomness import checksums, generators
from backstory.replay import check_recipe


def changed(**fields: Any) -> Recipe:
    return dataclasses.replace(examples.make("adamw", dropout=0.3), **fields)


def unlike() -> Recipe:
    made = examples.make()
    draws = torch.Generator()
    draws.seed()
    nn.init.normal_(next(iter(made.model.parameters())), generator=draws)
    return made


class Anew(list[Any]):
    def __getitem__(self, t: Any) -> Any:
        draws = torch.Generator()
        draws.seed()
        return [0, 1], (torch.randn(2, 3, dtype=examples.D, generator=draws), torch.zeros(2, dtype=torch.long))


def own_draws() -> Recipe:
    draws = torch.Generator()
    draws.seed()
    return changed(loss=lambda m, b: examples.loss(m, b) * (1 + torch.rand(1, generator=draws)))


def idle() -> Recipe:
    made = examples.make()
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    return made


def kink(model: nn.Module, batch: Any) -> Tensor:
    """Its gradient is 0 where the second derivative is not finite."""
    out: Tensor = model(batch[0])
    return (0 * out).square().sum(1).add(1e-30).pow(0.75) + (out - out.detach()).square().sum(1).pow(0.75)


def unknown() -> Recipe:
    made = examples.make()
    return dataclasses.replace(made, optimizer=torch.optim.Adamax(made.model.parameters()))


CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no recipe": (lambda: 3, "it returns a Recipe", "returns a int"),
    "it raises": (lambda: 1 / 0, "it returns a Recipe", "ZeroDivisionError"),
    "empty": (partial(changed, batches=[]), "it returns a Recipe", "no batches"),
    "start": (unlike, "two builds start from the same weights", "Seed torch"),
    "batches": (partial(changed, batches=Anew([0, 1])), "batches are the same", "the batch of step 0 differs"),
    "shape": (partial(changed, loss=lambda m, b: examples.loss(m, b).mean()), "one finite loss", "reduction='none'"),
    "nan": (partial(changed, loss=lambda m, b: examples.loss(m, b) / 0), "one finite loss", "NaN or Inf"),
    "idle": (idle, "every trained parameter", "got none in 4 steps"),
    "draws": (own_draws, "the first steps repeat themselves", "other losses at step 0"),
    "optimizer": (unknown, "the optimizer can be differentiated", "Adamax is not supported"),
    "kink": (partial(changed, loss=kink), "second derivatives are finite", "NaN or Inf"),
    "queries": (partial(changed, queries={"q": (torch.zeros(2, 9), torch.zeros(2))}), "query sets", "RuntimeError"),
}


@pytest.mark.parametrize("which", CASES)
def test_what_is_wrong_is_named_with_what_to_do(which: str) -> None:
    recipe, line, words = CASES[which]
    actual = check_recipe(recipe)
    assert not actual
    failed = [x for x in actual.lines if not x.passed]
    assert failed[0].name.startswith(line), str(actual)
    assert words in failed[0].detail
    assert "FAILED" in str(actual)


@pytest.mark.parametrize("recipe", [augmented.make, examples.NAME, partial(changed, queries={})])
def test_a_good_recipe_passes_and_leaves_no_trace(recipe: Any) -> None:
    before = checksums(generators())
    actual = check_recipe(recipe)
    assert actual, str(actual)
    assert len(actual.lines) == 9
    assert checksums(generators()) == before
    assert actual.as_dict()["passed"] is True


def test_it_is_compared_with_the_run(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", optimizer="momentum", dropout=0.4)
    args = run.config["recipe_args"]
    good = check_recipe(examples.NAME, args=args, run=run)
    assert good, str(good)
    assert "reproduces the run" in good.lines[-1].detail
    assert "compared at 4 steps" in good.lines[-1].detail
    other = check_recipe(examples.NAME, args={**args, "dropout": 0.0}, run=run)
    assert [x.name for x in other.lines if not x.passed] == ["the first steps are those of the run"]
    assert "differs from the run at step 0" in other.lines[-1].detail
    short = check_recipe(
        lambda: dataclasses.replace(examples.make(**args), batches=examples.make().batches[:5]), run=run
    )
    assert "the recipe has 5 steps, but the run has 8" in short.lines[-1].detail
