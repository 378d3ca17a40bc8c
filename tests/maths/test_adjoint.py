"""A query carried backward meets every occurrence with the influence that its embedding has."""

import pytest
import torch
from tests.maths.examples import RULES, P, queries, random_steps, recorded
from tests.support.oracles import assert_close, assert_same, unrolled

from backstory.maths.adjoint import Adjoint
from backstory.maths.blocked import Propagator
from backstory.maths.steps import Contraction

CAUSES = (
    "Both sides read one `Step`, so look at what only one of them does: a transposed propagator, JV or V swapped, "
    "the momentum's C (x_m), a decay on the wrong side, whitening applied once instead of twice."
)


@pytest.mark.parametrize("contraction", ["never", 1.0, "always"])
@pytest.mark.parametrize("curvature", [False, True], ids=["fisher", "own rows"])
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("rule", RULES)
def test_influence_is_query_times_embedding(
    rule: str, clipped: bool, curvature: bool, contraction: Contraction
) -> None:
    steps = random_steps(rule, clipped=clipped, curvature=curvature)
    v = queries()
    adjoint = Adjoint(v, contraction=contraction)
    actual = [adjoint.influence(step) for step in reversed(steps)][::-1]
    embedded = Propagator(P, dtype=torch.float64, contraction=contraction).embed(steps)
    assert_close(torch.cat(actual, 1), v @ torch.cat(embedded).T, 1e-10, CAUSES)


@pytest.mark.parametrize("rule", RULES)
def test_influence_equals_unrolling_by_autograd(rule: str) -> None:
    """Without the propagator's help, so that the two cannot be wrong together."""
    steps = random_steps(rule, clipped=True, curvature=True)
    v = queries()
    expected, over_all = unrolled([recorded(step, "always") for step in steps])
    adjoint = Adjoint(v)
    actual = [adjoint.influence(step) for step in reversed(steps)][::-1]
    assert_close(torch.cat(actual, 1), v @ torch.cat(expected).T, 1e-10, CAUSES)
    assert_close(adjoint.x_theta, v @ over_all, 1e-10, CAUSES)


def test_the_callers_queries_are_left_alone() -> None:
    v = queries()
    before = v.clone()
    Adjoint(v).influence(random_steps("momentum")[0])
    assert torch.equal(v, before)


def test_each_query_is_answered_as_if_alone() -> None:
    steps = random_steps("groups", clipped=True)
    v = queries()
    together = Adjoint(v).influence(steps[-1])
    alone = torch.cat([Adjoint(v[i : i + 1]).influence(steps[-1]) for i in range(len(v))])
    assert_same(together, alone, P)


@pytest.mark.parametrize("rule", RULES)
def test_the_effect_of_a_step_gives_its_influences_and_moves_nothing(rule: str) -> None:
    steps = random_steps(rule)
    adjoint = Adjoint(queries())
    adjoint.influence(steps[-1])
    s = adjoint.effect(steps[-2])
    assert_same(adjoint.effect(steps[-2]), s, P)
    assert_close(-(s @ steps[-2].G.T) * steps[-2].w, adjoint.influence(steps[-2]), 1e-12)
