"""Every row of the study of sources is the sum that it says; on a tiny net and made-up text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from experiments.data.texts import PARTS, recipe, source_of
from experiments.domains.methods import (
    COMPRESSED,
    DEFAULT,
    IN_RUN,
    Problem,
    by_insight,
    exact_row,
    influence_rows,
    paper_row,
    recorded_rows,
    tracin_row,
    trained,
)
from experiments.gpt.setups import domain_losses
from experiments.recorded import recorded
from tests.demo.test_texts import without_network
from tests.experiments.data.test_texts import TINY
from torch import Tensor

from backstory.demo.gpt_model import token_losses
from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def problem(text: None) -> Problem:
    return trained(TINY, 0)


def test_the_last_third_is_the_trained_model(problem: Problem) -> None:
    assert [len(problem.thirds), len(problem.names)] == [3, 3]
    last = problem.thirds[-1][0]
    assert all(torch.equal(last[name], x) for name, x in problem.trained.model.state_dict().items())
    assert not torch.equal(problem.thirds[0][0]["head.weight"], last["head.weight"])


def test_tracin_of_a_group_is_the_sum_over_its_passages(problem: Problem) -> None:
    found, plan = tracin_row(problem), problem.trained
    parameters = list(plan.model.parameters())

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).double()

    expected = {p: torch.zeros(3, 3, dtype=torch.float64) for p in PARTS}
    end = {name: x.clone() for name, x in plan.model.state_dict().items()}
    for weights, rate in problem.thirds:
        plan.model.load_state_dict(weights)
        asked = [gradient(token_losses(plan.model, x).mean()) for x in problem.queries]
        for ids, batch in plan.batches:
            for name, tokens in zip(ids, batch, strict=True):
                own = gradient(token_losses(plan.model, tokens[None]).sum())
                row = problem.names.index(source_of(name))
                for p in PARTS:
                    if name in problem.gone[p][source_of(name)].samples:
                        expected[p][row] += rate * torch.stack([v @ own for v in asked])
    plan.model.load_state_dict(end)
    for p in PARTS:
        torch.testing.assert_close(found[p], expected[p], rtol=1e-3, atol=1e-5 * float(expected[p].abs().max()))


def test_the_exact_row_is_the_effect_of_removing_a_little_of_each_group(problem: Problem) -> None:
    found, small = exact_row(problem), 1e-4
    groups = [Removal(problem.gone[p][s].samples, share=small) for p in PARTS for s in problem.names]
    queries = problem.queries
    effect = (
        leave_out(lambda: recipe(TINY, 0), groups, lambda m: domain_losses(m, queries), dtype=torch.float64) / small
    )
    for p, expected in zip(PARTS, effect.chunk(2), strict=True):
        torch.testing.assert_close(found[p], expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))


def test_what_insight_says_is_the_sum_over_the_passages_in_the_order_of_the_domains(
    problem: Problem, tmp_path: Path
) -> None:
    plan = recipe(TINY, 0)
    run = recorded(plan, tmp_path / "run", clip_norm=plan.clip_norm)
    run.describe(ids := [str(i) for names, _ in plan.batches for i in names], source=[source_of(i) for i in ids])
    summed = problem.of(run.query(plan.model, domain_losses, problem.queries))
    found = by_insight(problem, run, plan.model, "here")
    for p in PARTS:  # embeddings are stored in float16
        torch.testing.assert_close(found[p], summed[p], rtol=0.02, atol=0.01 * float(summed[p].abs().max()))
    assert problem.said.pop("here").domains == tuple(problem.names)


def test_recorded_rows_and_others_are_matrices_of_both_parts(problem: Problem) -> None:
    rows = {**recorded_rows(problem), **influence_rows(problem), "paper": paper_row(problem)}
    assert set(problem.said) == {DEFAULT, COMPRESSED}
    assert {DEFAULT, COMPRESSED, IN_RUN, "influence-0.001", "influence-1000"} < set(rows)
    for matrices in rows.values():
        assert [tuple(matrices[p].shape) for p in PARTS] == [(3, 3), (3, 3)]
        assert all(bool(matrices[p].isfinite().all()) and float(matrices[p].abs().max()) > 0 for p in PARTS)
        assert not torch.equal(matrices["whole"], matrices["half"])
