"""What a record must look like before it is kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.store.builders import diagonal_record, diagonal_run, new_run, record

from backstory.errors import BackstoryError, NumericalError, UsageError
from backstory.store import StepRecord

GOOD = record(0)
WRONG: dict[str, tuple[StepRecord, type[BackstoryError], str]] = {
    "too wide": (
        replace(GOOD, rows=torch.zeros(1, 13)),
        UsageError,
        r"expected rows of shape \(1, 12\), got \(1, 13\)",
    ),
    "ids missing": (replace(GOOD, samples=[]), UsageError, r"expected .* of shape \(0, 12\)"),
    "weight missing": (replace(GOOD, weight=torch.zeros(2)), UsageError, "weight of shape"),
    "group missing": (record(0, n_groups=1), UsageError, "expected 2 values per coefficient"),
    "a diagonal that no other step has": (
        replace(GOOD, P=torch.ones(12)),
        UsageError,
        r"P of shape None, got \(12,\)",
    ),
    "NaN": (replace(GOOD, rows=torch.full((1, 12), torch.nan)), NumericalError, "step 0 has NaN or Inf"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_record_is_refused_and_nothing_is_kept(tmp_path: Path, name: str) -> None:
    wrong, kind, message = WRONG[name]
    with new_run(tmp_path / "run") as store:
        with pytest.raises(kind, match=message):
            store.append([wrong])
        assert (store.n_steps(), store.n_rows()) == (0, 0)
        store.append([GOOD])
        assert store.verify() == []


@pytest.mark.parametrize("P", [None, torch.ones(11), torch.ones(1, 12)], ids=["none", "short", "a matrix"])
def test_every_step_of_a_run_with_a_diagonal_has_one(tmp_path: Path, P: torch.Tensor | None) -> None:
    with diagonal_run(tmp_path / "run", 2) as store:
        with pytest.raises(UsageError, match=r"P of shape \(12,\), got"):
            store.append([replace(diagonal_record(2), P=P)])
        assert store.n_steps() == 2
        store.append([diagonal_record(2)])
        assert store.verify() == []
