"""The plan of a workload beside what was found: the same training, and differences that are relative."""

import pytest
import torch
from experiments.bench.planning import planned, recipe_of
from experiments.bench.training import Plain
from experiments.bench.workloads import TINY

from backstory.replay.recipe import take_step


@pytest.mark.parametrize("name", TINY)
def test_the_recipe_trains_as_the_workload_does(name: str) -> None:
    made, loop = recipe_of(TINY[name]), Plain(TINY[name])
    loop.advance(3)
    for step in range(3):
        take_step(made, step)
    for p, q in zip(made.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_what_was_planned_is_set_beside_what_was_found() -> None:
    actual = {"steps": 6, "mean_cpu_ratio": 2.0, "run_cpu_ratio": 4.0, "bytes_per_occurrence": 1000.0}
    told = planned(TINY["B"], actual, seconds=0.01)
    assert told["ratio_off"] == pytest.approx(told["planned_ratio"] / 2 - 1)
    assert told["run_ratio_off"] == pytest.approx(told["planned_run_ratio"] / 4 - 1)
    assert told["bytes_off"] == pytest.approx(told["planned_bytes"] / 1000 - 1)
    assert told["planned_bytes"] > 100
