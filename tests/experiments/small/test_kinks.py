"""ReLU beside GELU on a run of seconds."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.data.images import recipe, removals, setup_of
from experiments.small.kinks import QUERY, _share, kink_share, study
from tests.support import examples
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.reverse import reverse
from backstory.replay.tape import Removal

D = torch.float64
FEW = (1.0, 0.1, 0.01)
REMOVALS = [Removal((s,)) for s in range(6)]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_smooth_net_has_no_kinks(kind: str) -> None:
    actual = kink_share(partial(examples.make, kind), REMOVALS, "q", FEW)
    assert actual.kinks < 0.03, actual
    assert actual.gaps[0] > 0.01
    assert actual.smooth == pytest.approx(1 - actual.kinks)
    assert actual.as_dict()["factors"] == (1.0, 0.1, 0.01)


def toy(start: float = 0.5, target: float = -2.0) -> Recipe:
    """Sample 0 takes w from 0.5 to just below 0, where ReLU is silent to sample 1: any removal wakes it up."""
    model = nn.Linear(1, 1, bias=False, dtype=D)
    with torch.no_grad():
        model.weight.fill_(start)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (torch.relu(m(batch[0])) - batch[1]).squeeze(1) ** 2

    def one(name: int, y: float) -> tuple[list[int], tuple[Tensor, Tensor]]:
        return [name], (torch.ones(1, 1, dtype=D), torch.full((1, 1), y, dtype=D))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model=model, optimizer=optimizer, loss=loss, batches=[one(0, target - 1e-4), one(1, 1.0)])


def query(model: nn.Module) -> Tensor:
    return (next(model.parameters()) - 1).square().reshape(-1)


def test_a_kink_that_is_crossed_is_seen() -> None:
    actual = kink_share(toy, [Removal((0,))], query, FEW)
    assert actual.kinks > 0.5, actual
    away = kink_share(partial(toy, start=2.0), [Removal((0,))], query, FEW)
    assert away.kinks < 0.03, away


def test_no_gap_means_no_kinks() -> None:
    def linear(model: nn.Module) -> Tensor:
        return next(model.parameters()).reshape(-1)

    last = kink_share(partial(toy, start=2.0), [Removal((1,))], linear, FEW)
    assert last.kinks == 0.0
    assert last.gaps[0] < 1e-9


@pytest.mark.parametrize("factors", [(1.0,), (2.0, 0.1), (1.0, 0.0)])
def test_factors_must_shrink(factors: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="factors"):
        kink_share(examples.make, REMOVALS, "q", factors)


TINY = setup_of("tiny", "relu", "sgd", 2, 64)
FACTORS = (1.0, 0.1, 1e-3, 1e-4)


@pytest.fixture(scope="module")
def actual() -> dict[str, Any]:
    return study(TINY, [0, 1], count=3, factors=FACTORS)


def test_a_smooth_net_shows_no_kinks_and_relu_does(actual: dict[str, Any]) -> None:
    rows = {(r["activation"], r["kind"]): r for r in actual["rows"]}
    assert set(rows) == {(a, k) for a in ("relu", "gelu") for k in ("single", "all")}
    for kind in ("single", "all"):
        smooth, kinked = rows["gelu", kind], rows["relu", kind]
        assert smooth["peak"] == pytest.approx(0.1, rel=0.05), smooth
        assert smooth["share"] == 0.0, smooth
        assert kinked["peak"] > 0.3, kinked
        assert kinked["share"] > 0.5, kinked
        assert kinked["share"] == pytest.approx(sum(kinked["share_seeds"]) / 2)
        assert actual["beyond"][kind] == pytest.approx(1 - smooth["gaps"][0] / kinked["gaps"][0])
        assert kinked["gaps"][1] == pytest.approx(sum(g[1] for g in kinked["gaps_seeds"]) / 2)
    assert json.loads(json.dumps(actual)) == actual


def test_a_share_needs_two_factors_that_agree() -> None:
    assert _share((1.0, 0.1, 0.01, 0.001), (0.1, 0.3, 2e-4, 2.2e-5)) == pytest.approx(0.8)
    assert _share((1.0, 0.1), (0.1, 0.0101)) == 0.0
    assert _share((1.0, 0.01, 0.001), (0.1, 0.3, 2e-5)) is None


def test_the_first_gap_is_truth_against_unrolling(actual: dict[str, Any]) -> None:
    setup = replace(TINY, activation="gelu")
    single, _ = removals(setup, 1, 3)
    truth = leave_out(lambda: recipe(setup, 1), single, QUERY, dtype=torch.float64)
    answer = reverse(lambda: recipe(setup, 1), QUERY)
    unrolled = torch.stack([answer.sum_over(r.samples, steps=r.steps) for r in single])
    row = next(r for r in actual["rows"] if (r["activation"], r["kind"]) == ("gelu", "single"))
    assert row["gaps_seeds"][1][0] == pytest.approx(float((truth - unrolled).norm() / truth.norm()), rel=1e-6)


def test_the_folder_keeps_what_was_retrained_and_progress_is_told(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    actual = study(TINY, [0], ["gelu"], count=2, factors=(1.0, 0.1), cache=tmp_path, say=lambda *x: said.append(x))
    assert actual["beyond"] == {"single": None, "all": None}
    assert any(tmp_path.rglob("*.json"))
    assert said[-1] == ("gelu, seed 0, all: retrain", 4, 4)


def test_unknown_activations_are_named() -> None:
    with pytest.raises(UsageError, match="relu"):
        study(TINY, [0], ["tanh"])
