"""The bound's own retraining and unrolling against the truth's, and a bound that must hold."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from experiments.data.images import setup_of
from experiments.fidelity.full import influences, replayed
from experiments.small.bound import measured, removal, scheduled, study

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import reverse
from backstory.replay.tape import Removal

TINY = replace(setup_of("tiny", "gelu", "sgd", 2, 32), hidden=2, queries=10)  # T = 4
QUERY = QuerySet("test", mean=True)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return study(TINY, 0, C=3.0, count=3)


def test_the_rates_are_the_theorems() -> None:
    plan = scheduled(TINY, 0, 3.0)
    seen = []
    for _ in range(3):
        seen.append(plan.optimizer.param_groups[0]["lr"])
        plan.optimizer.step()
        plan.schedule.step()
    assert seen == pytest.approx([3 / (4 * t) ** 0.5 for t in (1, 2, 3)])


def test_retraining_and_unrolling_agree_with_the_truth(found: dict[str, Any]) -> None:
    def make() -> Any:
        return scheduled(TINY, 0, 3.0)

    gone = [Removal((r["sample"],), (r["step"],)) for r in found["rows"]]
    truth = leave_out(make, gone, QUERY, dtype=torch.float64)[:, 0]
    answer = reverse(make, QUERY)
    for row, removed, expected in zip(found["rows"], gone, truth, strict=True):
        assert row["truth"] == pytest.approx(float(expected), rel=1e-8)
        exact = float(answer.sum_over(removed.samples, steps=removed.steps)[0])
        assert row["hessian"]["influence"] == pytest.approx(exact, rel=1e-7)


def test_the_embeddings_agree_with_the_adjoint(found: dict[str, Any]) -> None:
    replay = replayed(scheduled(TINY, 0, 3.0))
    at = {(t, i): k for k, (t, i) in enumerate((t, i) for t, (ids, _) in enumerate(replay.recipe.batches) for i in ids)}
    for name, curvature in (("ggn", "exact"), ("empirical", "empirical")):
        scores = influences(replay, curvature)
        for row in found["rows"]:
            expected = float(scores[at[row["step"], row["sample"]]])
            assert row[name]["influence"] == pytest.approx(expected, rel=1e-7), name


def test_the_bounds_hold_and_the_theorem_is_what_it_says(found: dict[str, Any]) -> None:
    k = found["constants"]
    assert k["theorem"] == pytest.approx(
        32 / 3 * k["G"] ** 2 * k["C"] ** 3 * k["L"] * torch.tensor(k["C"] * k["Lambda"]).exp().item(), rel=1e-5
    )
    assert k["proof"] < k["theorem"]
    assert (k["T"], k["parameters"]) == (4, 64 * 2 + 2 + 2 * 10 + 10)
    for row in found["rows"]:
        assert row["hessian"]["weights_error"] <= row["weights_bound"] <= k["theorem"]
        for name in ("hessian", "ggn", "empirical"):
            assert row[name]["error"] <= row[name]["bound"], name
    assert all(v["held"] for v in found["verdict"].values())
    assert json.loads(json.dumps(found)) == found


def test_a_removal_at_the_last_step_is_exact() -> None:
    plan = scheduled(TINY, 0, 3.0)
    row, without = removal(measured(plan, 3.0), 3, 0)
    assert row["weights_bound"] == 0.0
    assert row["hessian"]["weights_error"] < 160 * 16 * 2**-53 < 1e-6 < row["distance"]  # 160 weights, batches of 16
    assert row["ggn"]["influence"] == pytest.approx(row["hessian"]["influence"], rel=1e-12)
    assert len(without) == 5


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="at most"):
        study(replace(TINY, hidden=64))
    with pytest.raises(UsageError, match="above 0"):
        study(TINY, C=0.0)
