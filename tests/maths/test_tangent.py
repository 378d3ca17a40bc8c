"""Carrying removals forward: one occurrence is the adjoint's business too; repeats against a dense product."""

import pytest
import torch
from tests.maths.examples import P, queries, random_steps
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.adjoint import Adjoint
from backstory.maths.steps import Contraction, Step
from backstory.maths.tangent import Tangent

FORMS: list[Contraction] = ["never", 1.0, "always", "when_expanding"]


def own_rows(step: Step, per: int) -> Step:
    """The same step with `per` curvature rows of its own for each sample."""
    g = torch.Generator().manual_seed(len(step.w))
    V = 0.3 * torch.randn(len(step.w) * per, P, generator=g, dtype=torch.float64)
    return step._replace(V=V, dot_v=V @ (step.w @ step.G))


@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize(
    "mode", ["plain", "momentum", "nesterov", "groups", "plain, own diagonal", "nesterov, own diagonal"]
)
@pytest.mark.parametrize("contraction", FORMS)
@pytest.mark.parametrize("per", [0, 1, 3])
def test_one_occurrence_equals_the_adjoint(clipped: bool, mode: str, contraction: Contraction, per: int) -> None:
    steps = [own_rows(s, per) if per else s for s in random_steps(mode, clipped=clipped)]
    v = queries()
    adjoint = Adjoint(v, contraction=contraction)
    scores = [adjoint.influence(s) for s in reversed(steps)][::-1]
    where = [(t, i) for t in (0, len(steps) // 2, len(steps) - 1) for i in (0, len(steps[t].w) - 1)]
    tracked = Tangent(len(where), P, dtype=torch.float64, contraction=contraction)
    for t, step in enumerate(steps):
        tracked.advance(step, [(j, i) for j, (at, i) in enumerate(where) if at == t])
    expected = torch.stack([scores[t][:, i] for t, i in where], 1)
    assert_close(v @ tracked.x.T, expected, 1e-9)


def test_a_repeated_sample_takes_its_curvature_with_it() -> None:
    """Plain steps, literal form: x' = (I − η (H − H_z)) x + η w g wherever z occurs."""
    steps = [own_rows(s, 2) for s in random_steps("plain", clipped=False)]
    tracked = Tangent(1, P, dtype=torch.float64, contraction="never")
    x: Tensor = torch.zeros(P, dtype=torch.float64)
    for t, step in enumerate(steps):
        occurs = t % 2 == 0
        tracked.advance(step, [(0, 0)] if occurs else [])
        assert step.V is not None
        kept = step.V[2:] if occurs else step.V
        rate = float(step.coefficients.rate)
        x = x - rate * (kept.T @ (kept @ x)) + (rate * step.w[0] * step.G[0] if occurs else 0.0)
    assert_close(tracked.x, x[None], 1e-10)


def test_a_sample_that_is_drawn_twice_in_a_step_moves_by_both() -> None:
    (step, *_) = random_steps("momentum", clipped=True)
    tracked = Tangent(3, P, dtype=torch.float64, contraction="never")
    tracked.advance(step, [(0, 0), (0, 1), (1, 0), (2, 1)])
    assert_close(tracked.x[:1], tracked.x[1:2] + tracked.x[2:], 1e-12)
