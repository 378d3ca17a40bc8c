"""The study of planted data: its figures by hand, its truth by retraining."""

import json

import pytest
import torch
from experiments.planted.setups import PLANTED, problem_of
from experiments.planted.study import auroc, interval, precision, study
from tests.experiments.planted.test_setups import DIGITS

from backstory.replay.recipe import take_step, weights


def test_auroc_counts_pairs() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0], dtype=torch.float64)
    bad = torch.tensor([True, False, True, False, False])
    pairs = [1.0 if b > c else 0.5 if b == c else 0.0 for b in scores[bad] for c in scores[~bad]]
    assert auroc(scores, bad)[0] == pytest.approx(sum(pairs) / len(pairs))
    assert auroc(-scores, bad)[0] == pytest.approx(1 - sum(pairs) / len(pairs))
    assert auroc(bad.double(), bad) == (1.0, 0.0)
    assert auroc(torch.zeros(5), bad)[0] == 0.5


def test_the_variance_is_what_repetition_gives() -> None:
    g = torch.Generator().manual_seed(0)
    bad = torch.arange(120) < 30
    actual = [auroc(torch.randn(120, generator=g, dtype=torch.float64) + bad, bad) for _ in range(400)]
    spread = torch.tensor([a for a, _ in actual]).var()
    said = torch.tensor([v for _, v in actual]).mean()
    assert float(said / spread) == pytest.approx(1.0, abs=0.25)


def test_precision_is_the_share_among_the_most_suspect() -> None:
    bad = torch.tensor([True, True, False, False, True])
    assert precision(torch.tensor([5.0, 4.0, 3.0, 1.0, 0.0]), bad) == pytest.approx(2 / 3)
    assert precision(torch.tensor([0.0, 0.0, 9.0, 9.0, 9.0]), bad) == pytest.approx(1 / 3)


def test_intervals_hold_both_kinds_of_chance() -> None:
    narrow, wide = interval([(0.8, 1e-6)] * 3), interval([(0.8, 0.01)] * 3)
    apart = interval([(0.7, 1e-6), (0.8, 1e-6), (0.9, 1e-6)])
    assert narrow == pytest.approx((0.8, 0.8), abs=0.005)
    assert wide[1] - wide[0] > 0.15
    assert apart[0] < 0.74
    assert apart[1] > 0.86
    assert interval([(0.99, 0.01)] * 2)[1] <= 1.0


def test_the_change_is_retraining_without_all_that_was_planted() -> None:
    problem = problem_of(DIGITS, "labels", 1, 0.25)
    losses = []
    for without in (False, True):
        plan = problem.make()
        for t, (ids, _) in enumerate(plan.batches):
            w = weights(plan, t)
            w[[k for k, i in enumerate(ids) if without and str(i) in problem.planted]] = 0
            take_step(plan, t, w)
        with torch.no_grad():
            losses.append(float(problem.loss(plan.model, problem.queries)))
    assert float(problem.truth()[PLANTED]) == pytest.approx(losses[1] - losses[0], rel=1e-3, abs=1e-6)


def test_study_ranks_methods_and_survives_json() -> None:
    said: list[tuple[str, int, int]] = []
    actual = study(DIGITS, "labels", [0], share=0.1, say=lambda *x: said.append(x))
    assert json.loads(json.dumps(actual)) == actual
    assert (actual["samples"], actual["planted"]) == ([96], [10])
    assert said[-1] == ("seed 0: methods", 9, 9)
    rows = {row["method"]: row for row in actual["rows"]}
    assert {
        "default",
        "exact",
        "tracin",
        "influence-function",
        "influence-function-self",
        "gradient-norm",
        "loss",
    } < set(rows)
    values = [row["auroc"] for row in actual["rows"]]
    assert values == sorted(values, reverse=True)
    assert rows["influence-function"]["auroc"] >= rows["influence-function-0.001"]["auroc"]
    assert rows["influence-function"]["chosen"].startswith("damping")
    assert rows["exact"]["predicted"][0] == pytest.approx(actual["change"][0], rel=0.3)
    assert 0 <= rows["default"]["hurt_planted"] <= 1
    assert "hurt_planted" not in rows["loss"]
