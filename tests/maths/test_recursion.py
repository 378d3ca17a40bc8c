"""The paper's equations, against an explicit product of steps, and the fast path against them."""

from itertools import pairwise

import pytest
import torch
from tests.support.oracles import algorithm_1, assert_close
from torch import Tensor

from backstory.maths.blocked import Propagator
from backstory.maths.recursion import SgdStep, embed, stitch
from backstory.maths.steps import Coefficients, Step

P, ROWS = 7, (3, 1, 4, 2, 3, 2)
CAUSES = "A ratio of −1 is the sign, of w or 1/w a weight; errors that grow towards the first steps are the order of products."


def run() -> list[SgdStep]:
    g = torch.Generator().manual_seed(1)
    return [
        SgdStep(
            0.7 * torch.randn(n, P, generator=g, dtype=torch.float64),
            torch.rand(n, generator=g, dtype=torch.float64) + 0.2,
            0.1 + 0.05 * t,
        )
        for t, n in enumerate(ROWS)
    ]


def explicit(steps: list[SgdStep]) -> Tensor:
    """Every displacement, carried by one matrix I − η H after the other."""
    out = []
    for t, (G, w, rate) in enumerate(steps):
        moved = (rate * w[:, None] * G).T
        for later in steps[t + 1 :]:
            H = torch.einsum("b,bi,bj->ij", later.w, later.G, later.G)
            moved = moved - later.rate * H @ moved
        out.append(moved.T)
    return torch.cat(out)


def test_embeddings_are_displacements_carried_to_the_end() -> None:
    steps = run()
    assert_close(torch.cat(embed(steps).E), explicit(steps), 1e-12, CAUSES)


def test_with_weights_of_one_it_is_algorithm_1_line_by_line() -> None:
    steps = [s._replace(w=torch.ones_like(s.w)) for s in run()]
    expected, M = algorithm_1([s.G for s in steps], [s.rate for s in steps])
    actual = embed(steps)
    assert_close(torch.cat(actual.E), torch.cat(expected), 1e-12, CAUSES)
    assert_close(actual.K, torch.eye(P, dtype=torch.float64) - M, 1e-12)


@pytest.mark.parametrize("cuts", [[3], [1, 4], [1, 2, 3, 4, 5]], ids=str)
def test_segments_are_one_sweep(cuts: list[int]) -> None:
    steps, edges = run(), [0, *cuts, len(ROWS)]
    segments = [embed(steps[a:b]) for a, b in pairwise(edges)]
    assert_close(torch.cat(stitch(segments)), torch.cat(embed(steps).E), 1e-12, CAUSES)


def test_the_fast_path_is_this() -> None:
    steps = run()
    fast = Propagator(P, dtype=torch.float64, contraction="never")
    plain = [Step(s.G, s.w, Coefficients(s.rate, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)) for s in steps]
    expected = embed(steps)
    assert_close(torch.cat(fast.embed(plain)), torch.cat(expected.E), 1e-12, CAUSES)
    assert_close(fast.sigma, expected.K, 1e-12, CAUSES)
