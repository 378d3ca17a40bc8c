"""Single rows of the table against what the library itself says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.data.images import Setup, mean_loss, recipe, removals, setup_of
from experiments.fidelity.full import replayed
from experiments.fidelity.methods import _recorded_run, full, full_corrected, no_propagation, recorded
from experiments.fidelity.problem import Problem
from experiments.fidelity.updates import Update

from backstory.baselines.tracin import tracin_run
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import reverse

TINY = setup_of("tiny", "gelu", "sgd", 2)
MOMENTUM = replace(TINY, optimizer="momentum")
ROUNDING = 18 * 2 * (610 + 16 * 10) * 2**-53  # 18 steps or fewer, there and back: 610 weights, 16 images of 10 classes


def asked(setup: Setup, folder: Path) -> Problem:
    samples = [int(r.samples[0]) for r in removals(setup, 0, 6)[0]]
    return Problem(setup, 0, replayed(recipe(setup, 0)), samples, folder)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return asked(TINY, tmp_path_factory.mktemp("runs"))


def close(a: torch.Tensor, b: torch.Tensor, rel: float) -> bool:
    return bool((a - b).norm() <= rel * b.norm())


@pytest.mark.parametrize(
    ("curvature", "recorded_as", "rate", "optimizer"),
    [
        ("empirical", "empirical", 1.0, "sgd"),
        ("exact", "exact:10", 0.3, "sgd"),
        ("empirical", "empirical", 10.0, "momentum"),
        ("exact", "exact:10", 0.3, "momentum"),
    ],
)
def test_full_coordinates_equal_a_recording_with_full_rank(
    curvature: str, recorded_as: str, rate: float, optimizer: str, tmp_path: Path
) -> None:
    """Rank 64 keeps every coordinate of this net; what is left between the two is float16."""
    setup = replace(TINY, rate=rate, optimizer=optimizer)
    problem = asked(setup, tmp_path)
    here, there = full(problem, curvature, "auto"), recorded(problem, "random", 64, recorded_as, "joint")
    assert close(here.single, there.single, 0.01)
    assert close(here.all, there.all, 0.01)
    if curvature == "empirical":
        assert not close(full(problem, curvature, "literal").all, there.all, 0.01), "the literal form is another one"


def test_the_factored_diagonal_is_what_a_recording_of_adamw_keeps(tmp_path: Path) -> None:
    """At full rank; a recording drops how P changes between two steps, this does not, so they are only near each other."""
    problem = asked(setup_of("tiny", "gelu", "adamw", 8), tmp_path)
    here, there = full(problem, "exact", "literal", "factored"), recorded(problem, "random", 64, "exact:10", "joint")
    assert close(here.single, there.single, 0.03)
    assert close(here.all, there.all, 0.1)
    assert not close(full(problem, "exact", "literal", "proxy").single, there.single, 0.5)


def test_the_correction_equals_that_of_a_recording_with_full_rank(tmp_path: Path) -> None:
    problem = asked(replace(TINY, images=24, batch_size=4, epochs=3, rate=0.1), tmp_path)
    here, there = full_corrected(problem), recorded(problem, "random", 64, "exact:10", "corrected")
    assert close(here.all, there.all, 5e-4)
    assert not close(full(problem, "exact", "literal").all, there.all, 2e-3), "the correction changes nothing here"
    assert close(here.single, full(problem, "exact", "literal").single, ROUNDING)


def test_no_propagation_is_tracin_in_the_run(problem: Problem) -> None:
    run, model, _ = _recorded_run(problem, "random", 64, "empirical", 4)
    answer = tracin_run(run, model, mean_loss, problem.queries)
    expected = torch.stack([answer.sum_over([s])[0] for s in problem.samples])
    assert close(no_propagation(problem).all, expected, 2e-3)


def test_single_is_the_last_epochs_part_of_all(problem: Problem) -> None:
    answer = reverse(lambda: recipe(TINY, 0), QuerySet("test", mean=True))
    found = full(problem, "exact", "literal")
    expected = torch.stack([answer.sum_over([s], steps=problem.last)[0] for s in problem.samples])
    assert close(found.single, expected, 0.1), "near the ceiling on a run of 12 steps"
    assert not close(found.single, found.all, 0.2)


def test_the_paper_on_a_run_with_momentum_is_plain_sgd_of_the_same_rate(tmp_path: Path) -> None:
    problem = asked(MOMENTUM, tmp_path)
    plain = replace(problem.replay, updates=[Update(TINY.rate / 10)] * len(problem.replay.updates))
    as_if = Problem(MOMENTUM, 0, plain, problem.samples, tmp_path)
    as_plain = full(as_if, "empirical", "literal").all
    assert close(full(problem, "empirical", "literal", "proxy").all, as_plain, ROUNDING)
    assert not close(full(problem, "empirical", "literal").all, as_plain, 0.5)
