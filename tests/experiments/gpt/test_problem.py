"""Agreement over four domains and its bootstrap, and the run with and without recording."""

from dataclasses import replace

import pytest
import torch
from experiments.gpt.problem import agreement, difference, interval, recorded, trained
from experiments.gpt.setups import recipe, removals
from experiments.statistics import Pair
from tests.experiments.gpt.test_setups import TINY, assert_trained_alike, without_network
from torch import Tensor

text = pytest.fixture(autouse=True)(without_network)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ranks(x: Tensor) -> list[int]:
    """By counting, not by sorting."""
    return [sum(float(b) < float(a) for b in x) for a in x]


def spearman(x: Tensor, y: Tensor) -> float:
    """Without ties: 1 − 6 Σ d² / n(n² − 1)."""
    n = len(x)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(ranks(x), ranks(y), strict=True)) / (n * (n * n - 1))


def test_agreement_is_the_mean_over_the_domains() -> None:
    scores, truth = noise(9, 4), noise(9, 4, seed=1)
    each = [spearman(scores[:, d], truth[:, d]) for d in range(4)]
    assert agreement(scores, truth) == pytest.approx(sum(each) / 4)
    mixed = torch.cat([truth[:, :3], -truth[:, 3:]], 1)
    assert agreement(mixed, truth) == pytest.approx(0.5)


def test_an_interval_holds_the_mean_and_narrows_with_removals() -> None:
    def bounds(n: int) -> tuple[float, float, float]:
        points = []
        for s in range(3):
            truth = noise(n, 4, seed=s)
            points.append((truth + noise(n, 4, seed=10 + s), truth))
        found = interval(points)
        return found["lower"], sum(agreement(*p) for p in points) / 3, found["upper"]

    few, many = bounds(20), bounds(200)
    assert few[0] < few[1] < few[2]
    assert many[0] < many[1] < many[2]
    assert many[2] - many[0] < few[2] - few[0]
    assert bounds(20) == pytest.approx(few, abs=1e-14)


def test_domains_share_their_resamples() -> None:
    """Four copies of one domain are one domain: their interval must not shrink as four independent ones would."""
    truth = noise(30, 1)
    scores = truth + noise(30, 1, seed=1)
    one, four = interval([(scores, truth)]), interval([(scores.expand(-1, 4), truth.expand(-1, 4))])
    assert four == pytest.approx(one)


def test_differences_are_paired() -> None:
    truth = noise(30, 4)
    scores = truth + 2 * noise(30, 4, seed=1)
    same = difference([Pair(truth, scores, scores)])
    assert same == pytest.approx({"mean": 0.0, "lower": 0.0, "upper": 0.0}, abs=1e-14)
    better = difference([Pair(truth, truth, scores), Pair(truth, truth, scores)])
    assert better["mean"] == pytest.approx(1 - agreement(scores, truth))
    assert 0 < better["lower"] < better["mean"] < better["upper"]
    assert difference([Pair(truth, scores, truth)])["mean"] == pytest.approx(-better["mean"])


def test_checkpoints_stand_at_the_thirds_of_the_run() -> None:
    problem = trained(TINY, 0, [])
    assert len(problem.thirds) == 3
    for name, x in problem.trained.model.state_dict().items():
        assert torch.equal(problem.thirds[-1][0][name], x)
    assert not torch.equal(problem.thirds[0][0]["head.weight"], problem.thirds[1][0]["head.weight"])
    rates = [rate for _, rate in problem.thirds]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < rates[0] <= TINY.rate
    assert problem.seconds > 0


@pytest.mark.parametrize("settings", [{}, {"projection": "random", "rank": 4, "curvature": "sampled:2/3"}])
def test_recording_changes_nothing_and_leaves_nothing(settings: dict[str, object]) -> None:
    problem = trained(TINY, 1, [str(r.samples[0]) for r in removals(TINY, 1, 3)])
    with recorded(problem, settings) as made:
        path = made.run.path
        assert made.run.n_steps == TINY.steps
        assert made.run.config["settings"]["seed"] == (1 if settings else 0)
        assert_trained_alike(replace(problem.trained, model=made.model), problem.trained)
    assert not path.exists()
    assert torch.equal(problem.queries, recipe(TINY, 1).queries["domains"])
