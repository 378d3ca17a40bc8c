"""Copies early and late: where they stand, what retraining says, and who tells them apart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.data.images import recipe, setup_of
from experiments.fidelity.methods import QUERY
from experiments.small.duplicates import EARLY, LATE, study, with_copies

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal

TINY = setup_of("tiny", "gelu", "sgd", 2, 96)  # 12 steps: the first and the last 3 get copies


@pytest.fixture(scope="module")
def actual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return study(TINY, [0, 1], count=6, rank=8, cache=tmp_path_factory.mktemp("cache"))


def test_copies_are_the_sample_itself_and_all_else_stays() -> None:
    plan, chosen = with_copies(TINY, 0, 6)
    before = recipe(TINY, 0)
    seen: dict[int, list[tuple[int, torch.Tensor, int]]] = {i: [] for i in chosen}
    for t, ((ids, (x, y)), (old, (old_x, old_y))) in enumerate(zip(plan.batches, before.batches, strict=True)):
        assert list(ids[: len(old)]) == old
        assert torch.equal(x[: len(old)], old_x)
        assert torch.equal(y[: len(old)], old_y)
        for i, image, label in zip(ids, x, y, strict=True):
            if int(i) % EARLY in seen:
                seen[int(i) % EARLY].append((int(i) // EARLY, image, int(label)))
        steps = {int(i) // EARLY: t for i in ids[len(old) :]}
        assert steps.get(1, 0) < 3
        assert steps.get(2, 9) >= 9
    for entries in seen.values():
        assert sorted(kind for kind, _, _ in entries) == [0, 0, 1, 2]
        assert all(torch.equal(image, entries[0][1]) and label == entries[0][2] for _, image, label in entries)


def test_only_methods_that_follow_the_run_tell_copies_apart(actual: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in actual["rows"]}
    assert [name for name, row in rows.items() if row["one_number"]] == ["influence function", "gradient dot"]
    assert rows["gradient dot"]["difference"] == 0.0
    assert rows["exact unrolling"]["difference"] > 0.9
    assert rows["full coordinates"]["late"] > 0.9
    assert rows["recorded, learned 8"]["late"] > 0.9
    for row in rows.values():
        assert row["difference"] == pytest.approx(sum(row["difference_seeds"]) / 2)
    assert json.loads(json.dumps(actual)) == actual


def test_the_truth_is_retraining_without_one_copy(actual: dict[str, Any]) -> None:
    plan, chosen = with_copies(TINY, 1, 6)
    gone = [Removal((chosen[2] + EARLY,)), Removal((chosen[2] + LATE,))]
    early, late = leave_out(lambda: with_copies(TINY, 1, 6)[0], gone, QUERY, dtype=torch.float64)[:, 0].tolist()
    truth = actual["values"][1]["truth"]
    assert (truth["early"][2], truth["late"][2]) == pytest.approx((early, late), rel=1e-9)
    assert len(plan.batches) == 12


def test_progress_is_told_and_too_short_runs_are_refused(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    study(TINY, [0], count=2, rank=4, say=lambda *x: said.append(x))
    assert said[-1] == ("seed 0: methods", 5, 5)
    with pytest.raises(UsageError, match="4 or more steps"):
        with_copies(setup_of("tiny", "gelu", "sgd", 1, 16), 0, 2)
