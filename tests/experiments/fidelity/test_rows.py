"""Every row of the table runs, for every optimizer, and says what it models."""

import pytest
import torch
from experiments.data.images import OPTIMIZERS, recipe, removals, setup_of
from experiments.fidelity.full import replayed
from experiments.fidelity.problem import Method, Problem
from experiments.fidelity.rows import methods

CASES = [
    (optimizer, m.name)
    for optimizer in OPTIMIZERS
    for m in methods(optimizer)
    if m.extra is None and optimizer in m.optimizers
]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Problem]:
    def one(optimizer: str) -> Problem:
        setup = setup_of("tiny", "gelu", optimizer, 2)
        samples = [int(r.samples[0]) for r in removals(setup, 0, 6)[0]]
        return Problem(setup, 0, replayed(recipe(setup, 0)), samples, tmp_path_factory.mktemp(optimizer))

    return {optimizer: one(optimizer) for optimizer in OPTIMIZERS}


def named(optimizer: str, name: str) -> Method:
    return next(m for m in methods(optimizer) if m.name == name)


@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_every_method_scores_every_removal(problems: dict[str, Problem], optimizer: str, name: str) -> None:
    method = named(optimizer, name)
    found = method.run(problems[optimizer])
    assert found.single.shape == found.all.shape == (6,)
    assert found.single.isfinite().all()
    assert found.all.unique().numel() == 6
    knows_time = method.optimizer_model != "none" and name != "tracin"
    assert torch.equal(found.single, found.all) != knows_time


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
    assert named(optimizer, name).optimizer_model == expected


def test_the_factored_diagonal_is_another_one(problems: dict[str, Problem]) -> None:
    exact, factored, paper = (
        named("adamw", name).run(problems["adamw"]).all for name in ("full-exact", "full-exact-factored", "paper")
    )
    assert 1e-3 < float((exact - factored).norm() / exact.norm()) < 1
    assert float((exact - paper).norm() / exact.norm()) > 0.9, "the proxy is another size altogether"
