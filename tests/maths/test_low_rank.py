"""Low-rank terms against the matrices that they stand for, carried along with them in numpy."""

import numpy as np
import torch
from tests.maths.examples import adam, heavy, nesterov
from tests.support.oracles import assert_close

from backstory.maths.low_rank import FIRST, LowRank, Terms
from backstory.maths.steps import Coefficients

P, EACH = 5, 2
STEPS = [heavy(0.1), nesterov(0.3), adam(0.2, 1), heavy(0.05, tau=0.0)]


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(EACH, P, generator=g).double(), torch.randn(EACH, P, generator=g).double()


def passed(low_rank: LowRank, steps: list[Coefficients], seed: int) -> torch.Tensor:
    """The steps one chunk, each with rows of its own."""
    first = FIRST + low_rank.steps
    s_all = low_rank.pass_by(steps)
    made = [rows(seed + i) for i in range(len(steps))]
    number = torch.arange(len(steps)).repeat_interleave(EACH) + first
    low_rank.add(Terms(torch.cat([h for h, _ in made]), torch.cat([w for _, w in made]), number))
    return s_all


def carried(A: np.ndarray, C: np.ndarray, steps: list[Coefficients], seed: int) -> tuple[list[np.ndarray], ...]:
    """S of each step, then A and C before the first one; −HᵀW stands for S J H̃."""
    out = []
    for i in reversed(range(len(steps))):
        k, (H, W) = steps[i], rows(seed + i)
        U = C - k.rate * k.a * A
        S = (1 - k.tau) * U - k.rate * k.n * A
        out.append(S)
        A, C = (1 - k.rate * k.decay) * A + k.l2 * S - H.numpy().T @ W.numpy(), k.momentum * U
    return out[::-1], [A, C]


def test_numbers_and_rows_are_the_matrices() -> None:
    """Two chunks one after the other, the second continuing the numbers of the first."""
    g = np.random.default_rng(0)
    A0, C0 = g.normal(size=(2, P, P))
    X = torch.from_numpy(g.normal(size=(3, P)))
    low_rank = LowRank()
    A, C = A0, C0
    for seed, steps in ((10, STEPS[2:]), (20, STEPS[:2])):
        before, first = low_rank.steps, (A, C)
        s_all = passed(low_rank, steps, seed)
        S, (A, C) = carried(*first, steps, seed)
        last = s_all[-1].expand(len(X), -1)
        s1, s2 = s_all[-1, :FIRST]
        whole = low_rank.times(X, last, X @ torch.from_numpy(s1.item() * A0 + s2.item() * C0).T)
        assert_close(whole, X @ torch.from_numpy(S[-1]).T, 1e-12, "rows Sᵀ of the chunk's last step")
        assert (low_rank.steps, low_rank.rows) == (before + 2, EACH * (before + 2))
    for numbers, expected in ((low_rank.a, A), (low_rank.c, C)):
        held = torch.from_numpy(numbers[0].item() * A0 + numbers[1].item() * C0)
        assert_close(low_rank.subtract(numbers, held), torch.from_numpy(expected), 1e-12)


def test_products_belong_to_one_matrix_each_and_are_carried_on() -> None:
    g = torch.Generator().manual_seed(3)
    X, Y, V = (torch.randn(2, P, generator=g).double() for _ in range(3))
    low_rank, zero = LowRank(), torch.zeros(P, P, dtype=torch.float64)
    low_rank.add_products(X, Y, V)
    assert_close(low_rank.subtract(low_rank.a, zero.clone()), X.T @ V, 1e-14)
    assert_close(low_rank.subtract(low_rank.c, zero.clone()), Y.T @ V, 1e-14)
    k = STEPS[0]
    low_rank.pass_by([k])
    assert_close(low_rank.subtract(low_rank.c, zero.clone()), k.momentum * (Y - k.rate * k.a * X).T @ V, 1e-14)


def test_products_that_are_nothing_are_not_kept() -> None:
    low_rank = LowRank()
    low_rank.add_products(torch.ones(2, P), torch.zeros(2, P), torch.ones(2, P))
    assert (low_rank.steps, low_rank.rows) == (1, 2)
