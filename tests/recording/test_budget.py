"""What a recording may take, counted against a store that is a few numbers."""

from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.loops import mlp, sgd, train

from backstory.errors import DiskError
from backstory.recording.recorder import Budget
from backstory.store import RunStore


class Numbers:
    """A run of 1,000 bytes whose rows take `each`, with or without a basis."""

    path = "."

    def __init__(self, rank: Any, each: int) -> None:
        self.config, self.bytes_per_row = {"settings": {"rank": rank}}, each
        self.names: list[str] = []

    def size_bytes(self) -> int:
        return 1000

    def tensor_names(self) -> list[str]:
        return self.names


def budget(run: Numbers, *, began: int = 0, planned: int | None = None, most: int | None = None) -> Budget:
    return Budget(cast(RunStore, run), began, planned, most)


def test_rows_are_counted_as_they_come() -> None:
    spent = budget(Numbers(16, 100), most=1500)
    spent.spend(0, 3)
    spent.spend(1, 2)
    with pytest.raises(DiskError, match=r"stopped before step 2: .* max_bytes=1,500\. The 2 earlier steps are safe"):
        spent.spend(2, 1)


@pytest.mark.parametrize("began", [0, 5])
def test_a_plan_is_checked_once_at_the_first_step(began: int) -> None:
    with pytest.raises(DiskError, match=rf"{began + 11} steps of 2 samples need about 2,200 bytes.*Nothing was"):
        budget(Numbers(16, 100), began=began, planned=began + 11, most=2000).spend(began, 2)
    fits = budget(Numbers(16, 100), began=began, planned=began + 10, most=2000)
    for step, batch in enumerate((2, 3, 2)):  # of 3 at every step it would not
        fits.spend(began + step, batch)


def test_rows_whose_width_is_still_to_be_chosen_wait() -> None:
    """At 100 bytes the six waiting rows would be too many, at the chosen 10 they are not; all six are counted then."""
    run = Numbers("auto:0.9", 100)
    spent = budget(run, most=1080)
    spent.spend(0, 3)
    spent.spend(1, 3)
    run.names, run.bytes_per_row = ["basis"], 10
    spent.spend(2, 2)
    with pytest.raises(DiskError, match="stopped before step 3"):
        spent.spend(3, 1)


def test_a_plan_waits_for_the_width_too() -> None:
    for planned, fits in ((102, True), (103, False)):
        run = Numbers("auto:0.9", 100)
        spent = budget(run, planned=planned, most=2000)
        spent.spend(0, 2)
        spent.spend(1, 2)
        run.names, run.bytes_per_row = ["basis"], 10
        if fits:
            spent.spend(2, 2)
            continue
        with pytest.raises(DiskError, match=r"103 steps.*2,020 bytes.*The 2 earlier steps are safe\. Lower rank="):
            spent.spend(2, 2)


def test_planned_windows_are_refused_before_the_first_row(tmp_path: Path) -> None:
    """There is room for the rows of all steps, but not for the curvature of their windows too."""
    settings: dict[str, Any] = {"projection": "learned", "curvature": "empirical", "warmup_steps": 2}
    model = mlp(width=9)
    train(tmp_path / "small", model, sgd(model), 5, **settings)
    rows = 3 * 3000 * RunStore.open(tmp_path / "small").bytes_per_row
    model = mlp(width=9)
    with pytest.raises(DiskError, match=r"3,000 steps of 3 samples need about"):
        train(tmp_path / "run", model, sgd(model), 5, planned=3000, max_bytes=round(1.02 * rows), **settings)
    train(
        tmp_path / "steps",
        model,
        sgd(model),
        5,
        planned=3000,
        max_bytes=round(1.02 * rows),
        curvature_of="steps",
        **settings,
    )
