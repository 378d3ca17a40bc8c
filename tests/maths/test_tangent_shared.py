"""Removing a sample twice where steps share curvature rows: the recursion forward, every product a matrix, with ω = 1 + ⟨g, x⟩."""

import numpy as np
import pytest
import torch
from tests.maths.examples import P, random_steps
from tests.support.oracles import assert_close

from backstory.maths.steps import Contraction, Step
from backstory.maths.tangent import Tangent

OCCURRENCES = {1: 0, 6: 1}  # step -> row of the tracked sample; the second of a step that may be clipped


def shared(rule: str, clipped: bool, size: float = 1.0) -> list[Step]:
    """Steps that share four orthogonal rows."""
    g = torch.Generator().manual_seed(4)
    Q = torch.linalg.qr(torch.randn(P, P, generator=g, dtype=torch.float64)).Q
    V = size * Q[:4] * torch.tensor([[1.3], [0.8], [0.5], [0.1]], dtype=torch.float64)
    made = random_steps(rule, clipped=clipped)
    return [s._replace(V=V, dot_v=V @ (s.w @ s.G), orthogonal=True) for s in made]


def with_own(steps: list[Step]) -> list[Step]:
    """Their samples keep κ g gᵀ of their own, before what the window shares."""
    made = []
    for t, s in enumerate(steps):
        assert s.V is not None
        assert s.dot_v is not None
        root = (s.w * (0.3 + 0.1 * t + torch.arange(len(s.w)).double())).sqrt()
        own, dots = root[:, None] * s.G, root * (s.G @ (s.w @ s.G))
        V, dot_v = torch.cat([own, s.V]), torch.cat([dots, s.dot_v])
        made.append(s._replace(orthogonal=False, V=V, dot_v=dot_v, shared=len(s.V)))
    return made


def by_hand(steps: list[Step], occurrences: dict[int, int], gamma: float | str) -> np.ndarray:
    """x at the end; J, H and its implicit form as dense matrices, in numpy."""
    x, y = np.zeros(P), np.zeros(P)
    for t, step in enumerate(steps):
        k, eye = step.coefficients, np.eye(P)
        assert step.V is not None
        V, G, w = step.V.numpy(), step.G.numpy(), step.w.numpy()
        n = w @ G
        rho = step.norm / (step.norm + 1e-6)
        J = eye if step.clip == 1 else step.clip * (eye - rho * np.outer(n, n) / (n @ n))
        alpha = step.clip * k.rate * ((1 - k.tau) * k.a + k.n)
        strength = alpha / (1 - k.momentum) if gamma == "always" else float(gamma) * alpha
        H = V.T @ np.linalg.inv(np.eye(len(V)) + strength * V @ V.T) @ V
        u = J @ (H @ x) + k.l2 * x
        if t in occurrences:
            g, weight = G[occurrences[t]], w[occurrences[t]]
            omega = 1 + g @ x
            if step.shared:  # its own part of H̃ is gone
                i, X = occurrences[t], np.linalg.inv(np.eye(len(V)) + strength * V @ V.T) @ V @ x
                u, omega = u - J @ (V[i] * X[i]), 1.0
            u = u - weight * omega * (J @ g)
        y = k.momentum * y + (1 - k.tau) * u
        x = (1 - k.rate * k.decay) * x - k.rate * (k.a * y + k.n * u)
    return np.asarray(x)


@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("contraction", ["never", "always"])
@pytest.mark.parametrize("rule", ["plain", "nesterov"])
def test_what_an_occurrence_keeps_of_its_own_is_gone_with_it(
    rule: str, contraction: Contraction, clipped: bool
) -> None:
    steps = with_own(shared(rule, clipped))
    tangent = Tangent(1, P, dtype=torch.float64, contraction=contraction)
    for t, step in enumerate(steps):
        tangent.advance(step, [(0, OCCURRENCES[t])] if t in OCCURRENCES else [])
    expected = by_hand(steps, OCCURRENCES, 0.0 if contraction == "never" else contraction)
    assert_close(tangent.x[0], torch.from_numpy(expected), 1e-11)


@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("contraction", ["never", 1.0, "always"])
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov", "adam"])
def test_a_sample_that_occurs_twice(rule: str, contraction: Contraction, clipped: bool) -> None:
    steps = shared(rule, clipped)
    tangent = Tangent(1, P, dtype=torch.float64, contraction=contraction)
    for t, step in enumerate(steps):
        tangent.advance(step, [(0, OCCURRENCES[t])] if t in OCCURRENCES else [])
    expected = by_hand(steps, OCCURRENCES, 0.0 if contraction == "never" else contraction)
    assert_close(tangent.x[0], torch.from_numpy(expected), 1e-11)
    alone = sum(by_hand(steps, {t: i}, 0.0 if contraction == "never" else contraction) for t, i in OCCURRENCES.items())
    assert np.linalg.norm(expected - alone) > 1e-3 * np.linalg.norm(expected), "ω is not 1"


def test_samples_do_not_mix() -> None:
    """Two tracked samples, one of which occurs once, another in the same step: each as if it were alone."""
    steps, others = shared("momentum", clipped=True), {1: 0, 3: 1}
    tangent = Tangent(3, P, dtype=torch.float64, contraction="always")
    for t, step in enumerate(steps):
        rows = {0: OCCURRENCES[t]} if t in OCCURRENCES else {}
        tangent.advance(step, (rows | ({1: others[t]} if t in others else {})).items())
    for i, occurrences in enumerate((OCCURRENCES, others, {})):
        assert_close(tangent.x[i], torch.from_numpy(by_hand(steps, occurrences, "always")), 1e-11)


def test_without_curvature_only_its_own_is_missing() -> None:
    """Zero rows are kept of a window that has none: x = η w g, then x (1 + …) once more."""
    steps = [s._replace(V=s.G[:0], dot_v=None) for s in shared("plain", clipped=False)]
    tangent = Tangent(1, P, dtype=torch.float64, contraction="always")
    x = torch.zeros(P, dtype=torch.float64)
    for t, step in enumerate(steps):
        tangent.advance(step, [(0, OCCURRENCES[t])] if t in OCCURRENCES else [])
        if t in OCCURRENCES:
            g, w = step.G[OCCURRENCES[t]], step.w[OCCURRENCES[t]]
            x = x + float(step.coefficients.rate) * w * (1 + g @ x) * g
    assert_close(tangent.x[0], x, 1e-12)
