"""Single rows of the table against what the library itself says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backstory.methods import tracin_run
from backstory.studies.fidelity_full import replayed
from backstory.studies.fidelity_methods import _recorded_run, full, full_corrected, methods, no_propagation, recorded
from backstory.studies.fidelity_problem import Problem, Scores
from backstory.studies.fidelity_setups import SETUPS, Setup, mean_loss, recipe, removals
from backstory.truth import QuerySet, unroll

TINY = replace(SETUPS["tiny"], epochs=2)


def asked(setup: Setup, folder: Path) -> Problem:
    samples = [int(r.samples[0]) for r in removals(setup, 0, 6)[0]]
    return Problem(setup, 0, replayed(recipe(setup, 0)), samples, folder)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return asked(TINY, tmp_path_factory.mktemp("runs"))


def close(a: torch.Tensor, b: torch.Tensor, rel: float) -> bool:
    return bool((a - b).norm() <= rel * b.norm())


@pytest.mark.parametrize(
    ("curvature", "recorded_as", "rate"),
    [("empirical", "empirical", 1.0), ("exact", "exact:10", 0.3)],
)
def test_full_coordinates_equal_a_recording_with_full_rank(
    curvature: str, recorded_as: str, rate: float, tmp_path: Path
) -> None:
    """Rank 64 keeps every coordinate of this net; what is left between the two is float16."""
    setup = replace(TINY, rate=rate)
    problem = asked(setup, tmp_path)
    here, there = full(problem, curvature, "auto"), recorded(problem, "random", 64, recorded_as, "joint")
    assert close(here.single, there.single, 0.01)
    assert close(here.all, there.all, 0.01)
    if curvature == "empirical":
        assert not close(full(problem, curvature, "literal").all, there.all, 0.01), "the literal form is another one"


def test_the_correction_equals_that_of_a_recording_with_full_rank(tmp_path: Path) -> None:
    problem = asked(replace(TINY, images=24, batch_size=4, epochs=3, rate=0.1), tmp_path)
    here, there = full_corrected(problem), recorded(problem, "random", 64, "exact:10", "corrected")
    assert close(here.all, there.all, 5e-4)
    assert not close(full(problem, "exact", "literal").all, there.all, 2e-3), "the correction changes nothing here"
    assert torch.equal(here.single, full(problem, "exact", "literal").single)


def test_no_propagation_is_tracin_in_the_run(problem: Problem) -> None:
    run, model, _ = _recorded_run(problem, "random", 64, "empirical", 4)
    answer = tracin_run(run, model, mean_loss, problem.queries)
    expected = torch.stack([answer.of([s])[0] for s in problem.samples])
    assert close(no_propagation(problem).all, expected, 2e-3)


def test_single_is_the_last_epochs_part_of_all(problem: Problem) -> None:
    answer = unroll(lambda: recipe(TINY, 0), QuerySet("test", mean=True))
    found = full(problem, "exact", "literal")
    expected = torch.stack([answer.of([s], steps=problem.last)[0] for s in problem.samples])
    assert close(found.single, expected, 0.1), "near the ceiling on a run of 12 steps"
    assert not close(found.single, found.all, 0.2)


@pytest.mark.parametrize("name", [m.name for m in methods() if m.extra is None])
def test_every_method_scores_every_removal(problem: Problem, name: str) -> None:
    method = next(m for m in methods() if m.name == name)
    found: Scores = method.run(problem)
    assert found.single.shape == found.all.shape == (6,)
    assert found.single.isfinite().all()
    assert found.all.unique().numel() == 6
    knows_time = method.optimizer_model != "none" and name != "tracin"
    assert torch.equal(found.single, found.all) != knows_time
