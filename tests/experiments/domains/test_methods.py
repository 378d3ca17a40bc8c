"""Every row of the study of sources is the sum that it says; on a tiny net and made-up text."""

from collections.abc import Iterator

import pytest
import torch
from experiments.data.texts import PARTS, recipe, source_of
from experiments.domains.methods import (
    SOURCES,
    SourceProblem,
    by_insight,
    methods,
    problem_of,
    recorded,
    tracin_of_groups,
)
from experiments.gpt.setups import domain_losses
from tests.experiments.data.test_passages import without_network
from tests.experiments.data.test_texts import TINY
from torch import Tensor

from backstory.demo.gpt_model import token_losses
from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def problem(text: None) -> Iterator[SourceProblem]:
    with problem_of(TINY, 0) as made:
        yield made


def test_tracin_of_a_group_is_the_sum_over_its_passages(problem: SourceProblem) -> None:
    actual, plan = tracin_of_groups(problem).values, problem.trained
    parameters = list(plan.model.parameters())

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).double()

    expected = {p: torch.zeros(3, 3, dtype=torch.float64) for p in PARTS}
    end = {name: x.clone() for name, x in plan.model.state_dict().items()}
    for weights, rate in problem.training.thirds:
        plan.model.load_state_dict(weights)
        asked = [gradient(token_losses(plan.model, x).mean()) for x in problem.queries]
        for ids, batch in plan.batches:
            for name, tokens in zip(ids, batch, strict=True):
                own = gradient(token_losses(plan.model, tokens[None]).sum())
                row = problem.names.index(source_of(name))
                for p in PARTS:
                    if name in problem.removals[p][row].samples:
                        expected[p][row] += rate * torch.stack([v @ own for v in asked])
    plan.model.load_state_dict(end)
    for p in PARTS:
        torch.testing.assert_close(actual[p], expected[p], rtol=1e-3, atol=1e-5 * float(expected[p].abs().max()))


def test_the_exact_row_is_the_effect_of_removing_a_little_of_each_group(problem: SourceProblem) -> None:
    actual, small = problem.of(problem.exact()), 1e-4
    groups = [Removal(r.samples, share=small) for p in PARTS for r in problem.removals[p]]
    queries = problem.queries
    effect = (
        leave_out(lambda: recipe(TINY, 0), groups, lambda m: domain_losses(m, queries), dtype=torch.float64) / small
    )
    for p, expected in zip(PARTS, effect.chunk(2), strict=True):
        torch.testing.assert_close(actual[p], expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))


def test_what_insight_reports_is_the_sum_over_the_passages_in_the_order_of_the_domains(problem: SourceProblem) -> None:
    made = recorded(problem)
    summed = problem.of(made.run.query(made.model, domain_losses, problem.queries))
    actual = by_insight(problem, "here", made.run).values
    for p in PARTS:  # embeddings are stored in float16
        torch.testing.assert_close(actual[p], summed[p], rtol=0.02, atol=0.01 * float(summed[p].abs().max()))
    assert problem.notes[SOURCES].pop("here").domains == tuple(problem.names)


def test_every_row_is_a_matrix_of_both_parts(problem: SourceProblem) -> None:
    for method in methods():
        values = method.scores(problem).values
        assert [tuple(values[p].shape) for p in PARTS] == [(3, 3), (3, 3)], method.name
        assert all(bool(values[p].isfinite().all()) and float(values[p].abs().max()) > 0 for p in PARTS), method.name
        assert not torch.equal(values["whole"], values["half"])
    assert set(problem.notes[SOURCES]) == {"default"}
    assert problem.notes["losses"].shape == (3,)
