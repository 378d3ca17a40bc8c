"""Every row of the table runs, for every optimizer, and models what it says; single rows against the library itself."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from experiments.data.images import OPTIMIZERS, setup_of
from experiments.fidelity.methods import (
    ImageProblem,
    Row,
    full,
    full_corrected,
    methods,
    no_propagation,
    problem_of,
    recorded,
    recording,
)
from experiments.fidelity.updates import Update

from backstory.baselines.tracin import tracin_run

TINY = setup_of("tiny", "gelu", "sgd", 2)
MOMENTUM = replace(TINY, optimizer="momentum")
ROUNDING = 18 * 2 * (610 + 16 * 10) * 2**-53  # 18 steps or fewer, there and back: 610 weights, 16 images of 10 classes


@pytest.fixture(scope="module")
def problems() -> Iterator[dict[str, ImageProblem]]:
    """One for each optimizer; their recordings are deleted with the module."""
    made = {optimizer: problem_of(setup_of("tiny", "gelu", optimizer, 2), 0, 6) for optimizer in OPTIMIZERS}
    with ExitStack() as stack:
        for problem in made.values():
            stack.enter_context(problem)
        yield made


@pytest.fixture(scope="module")
def problem(problems: dict[str, ImageProblem]) -> ImageProblem:
    return problems["sgd"]


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
    curvature: str, recorded_as: str, rate: float, optimizer: str
) -> None:
    """Rank 64 keeps every coordinate of this net; what is left between the two is float16."""
    setup = replace(TINY, rate=rate, optimizer=optimizer)
    with problem_of(setup, 0, 6) as problem:
        here, there = full(problem, curvature, "auto"), recorded(problem, "random", 64, recorded_as)
    assert close(here.values["single"], there.values["single"], 0.01)
    assert close(here.values["all"], there.values["all"], 0.01)
    if curvature == "empirical":
        assert not close(full(problem, curvature, "literal").values["all"], there.values["all"], 0.01), (
            "the literal form is another one"
        )


def test_the_factored_diagonal_is_what_a_recording_of_adamw_keeps() -> None:
    """At full rank; a recording drops how P changes between two steps, this does not, so they are only near each other."""
    with problem_of(setup_of("tiny", "gelu", "adamw", 8), 0, 6) as problem:
        here, there = full(problem, "exact", "literal", "factored"), recorded(problem, "random", 64, "exact:10")
    assert close(here.values["single"], there.values["single"], 0.03)
    assert close(here.values["all"], there.values["all"], 0.1)
    assert not close(full(problem, "exact", "literal", "proxy").values["single"], there.values["single"], 0.5)


def test_the_correction_equals_that_of_a_recording_with_full_rank() -> None:
    with problem_of(replace(TINY, images=24, batch_size=4, epochs=3, rate=0.1), 0, 6) as problem:
        here, there = full_corrected(problem), recorded(problem, "random", 64, "exact:10", "corrected")
    assert close(here.values["all"], there.values["all"], 5e-4)
    assert not close(full(problem, "exact", "literal").values["all"], there.values["all"], 2e-3), (
        "the correction changes nothing here"
    )
    assert close(here.values["single"], full(problem, "exact", "literal").values["single"], ROUNDING)


def test_no_propagation_is_tracin_in_the_run(problem: ImageProblem) -> None:
    run, model = recording(problem, "random", 64, "empirical", 4)
    answer = tracin_run(run, model, problem.loss, problem.queries)
    expected = torch.stack([answer.sum_over([s]) for s in problem.samples])
    assert close(no_propagation(problem).values["all"], expected, 2e-3)


def test_single_is_the_last_epochs_part_of_all(problem: ImageProblem) -> None:
    actual, expected = full(problem, "exact", "literal"), problem.of(problem.exact())["single"]
    assert close(actual.values["single"], expected, 0.1), "near the ceiling on a run of 12 steps"
    assert not close(actual.values["single"], actual.values["all"], 0.2)


def test_the_paper_on_a_run_with_momentum_is_plain_sgd_of_the_same_rate() -> None:
    problem, as_if = problem_of(MOMENTUM, 0, 6), problem_of(MOMENTUM, 0, 6)
    as_if.replay = replace(problem.replay, updates=[Update(TINY.rate / 10)] * len(problem.replay.updates))
    as_plain = full(as_if, "empirical", "literal").values["all"]
    assert close(full(problem, "empirical", "literal", "proxy").values["all"], as_plain, ROUNDING)
    assert not close(full(problem, "empirical", "literal").values["all"], as_plain, 0.5)


CASES = [(optimizer, m.name) for optimizer in OPTIMIZERS for m in methods(optimizer) if not (m.package or m.obstacle)]


def named(optimizer: str, name: str) -> Row:
    return next(m for m in methods(optimizer) if m.name == name)


@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_every_method_scores_every_removal(problems: dict[str, ImageProblem], optimizer: str, name: str) -> None:
    method = named(optimizer, name)
    values = method.scores(problems[optimizer]).values
    assert values["single"].shape == values["all"].shape == (6, 1)
    assert values["single"].isfinite().all()
    assert values["all"].unique().numel() == 6
    knows_time = method.about["optimizer_model"] != "none" and name != "tracin"
    assert torch.equal(values["single"], values["all"]) != knows_time


@pytest.mark.parametrize(
    ("optimizer", "name", "expected"),
    [
        ("sgd", "paper", "sgd, literal"),
        ("sgd", "learned-16-exact", "sgd, auto"),
        ("sgd", "full-exact-corrected", "sgd, literal, corrected"),
        ("momentum", "paper", "sgd proxy, literal"),
        ("momentum", "full-empirical-auto", "momentum, auto"),
        ("momentum", "random-16-exact", "momentum, auto"),
        ("adamw", "paper", "sgd proxy, literal"),
        ("adamw", "full-exact", "adamw, literal"),
        ("adamw", "full-exact-factored", "adamw, factored, literal"),
        ("adamw", "full-empirical-factored", "adamw, factored, auto"),
        ("adamw", "learned-16-exact", "adamw, factored, auto"),
        ("adamw", "tracin", "sgd proxy"),
        ("adamw", "gradient-dot", "none"),
    ],
)
def test_a_row_says_as_what_the_steps_were_taken(optimizer: str, name: str, expected: str) -> None:
    assert named(optimizer, name).about["optimizer_model"] == expected


def test_the_factored_diagonal_is_another_one(problems: dict[str, ImageProblem]) -> None:
    exact, factored, paper = (
        named("adamw", name).scores(problems["adamw"]).values["all"]
        for name in ("full-exact", "full-exact-factored", "paper")
    )
    assert 1e-3 < float((exact - factored).norm() / exact.norm()) < 1
    assert float((exact - paper).norm() / exact.norm()) > 0.9, "the proxy is another size altogether"
