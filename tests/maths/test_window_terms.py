"""Windows as numbers of few rows, against the recursion of their pair of matrices, written out in numpy."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.maths.examples import WINDOWS, window_steps
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.blocked import Propagator
from backstory.maths.steps import Step


def written_out(steps: list[Step], gamma: str) -> tuple[list[Tensor], np.ndarray]:
    """e of all occurrences, and A at the start."""
    p, E = steps[0].G.shape[1], list[Tensor]()
    A, C, one = np.eye(p), np.zeros((p, p)), np.eye(p)
    for step in reversed(steps):
        k, G, w = step.coefficients, step.G.numpy(), step.w.numpy()
        assert step.V is not None
        V, n = step.V.numpy(), step.G.numpy().T @ step.w.numpy()
        rho = step.norm / (step.norm + 1e-6)
        J = step.clip * (one - rho * np.outer(n, n) / (n @ n)) if step.clip < 1 else one
        U = C - k.rate * k.a * A
        S = (1 - k.tau) * U - k.rate * k.n * A
        damping = 0.0 if gamma == "never" else step.clip * k.rate * ((1 - k.tau) * k.a + k.n) / (1 - k.momentum)
        H = V.T @ np.linalg.inv(np.eye(len(V)) + damping * V @ V.T) @ V
        E.insert(0, torch.from_numpy(-w[:, None] * (G @ J.T @ S.T)))
        A = (1 - k.rate * k.decay) * A + S @ (J @ H + k.l2 * one)
        C = k.momentum * U
    return E, A


@pytest.mark.parametrize("p", [40, 16, 6], ids=["room for all", "room for some", "room for none"])
@pytest.mark.parametrize("contraction", ["never", "always"])
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov", "adam", "plain, then momentum"])
def test_they_are_the_recursion(rule: str, clipped: bool, contraction: Any, p: int) -> None:
    steps = window_steps(rule, clipped, p)
    expected, A = written_out(steps, contraction)
    propagator = Propagator(p, dtype=torch.float64, contraction=contraction)
    actual = propagator.embed(steps)
    assert (propagator._windows is not None) == (p == 40), "another way was taken"
    for t, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert_close(x, y, 1e-11, f"step {t}")
    assert_close(propagator.sigma, torch.from_numpy(A), 1e-11, "what comes before the steps")


def test_a_window_cut_between_two_calls_is_the_same() -> None:
    steps = window_steps("adam", True, 60)
    whole, parts = (Propagator(60, dtype=torch.float64) for _ in range(2))
    expected = torch.cat(whole.embed(steps))
    actual = [x for lo in (6, 4, 1, 0) for x in parts.embed(steps[lo : {6: 8, 4: 6, 1: 4, 0: 1}[lo]])[::-1]][::-1]
    assert_close(torch.cat(actual), expected, 1e-11)
    assert parts._windows is not None


def test_in_float32_they_are_as_exact_as_float32_is() -> None:
    steps = window_steps("adam", True, 24)
    expected, _ = written_out(steps, "always")
    single = [
        s._replace(G=s.G.float(), w=s.w.float(), V=V, dot_g=s.dot_g.float(), dot_v=s.dot_v.float())
        for lo, hi in pairwise(WINDOWS)
        for V in [steps[lo].V.float()]  # type: ignore[union-attr]
        for s in steps[lo:hi]
        if s.dot_g is not None and s.dot_v is not None
    ]
    actual = torch.cat(Propagator(24, dtype=torch.float32, contraction="always").embed(single))
    assert actual.dtype == torch.float32
    assert float((actual - torch.cat(expected)).norm() / torch.cat(expected).norm()) < 1e-6
