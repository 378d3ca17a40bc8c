"""Recorded steps made of random numbers, and the same numbers as `tests.support.oracles` wants them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from tests.support.oracles import Recorded
from torch import Tensor

from backstory.maths.steps import Coefficients, Contraction, Step

NEVER = 1e9  # a max_norm that no gradient here reaches


def plain(rate: float) -> Coefficients:
    """SGD as in the paper."""
    return Coefficients(rate=rate, l2=0.0, decay=0.0, momentum=0.0, tau=0.0, a=1.0, n=0.0)


def heavy(rate: float, tau: float = 0.1) -> Coefficients:
    """Heavy ball with both decays."""
    return Coefficients(rate=rate, l2=0.03, decay=0.05, momentum=0.9, tau=tau, a=1.0, n=0.0)


def nesterov(rate: float) -> Coefficients:
    """Nesterov with both decays."""
    return Coefficients(rate=rate, l2=0.02, decay=0.04, momentum=0.8, tau=0.0, a=0.8, n=1.0)


def adam(rate: float, s: int) -> Coefficients:
    """Adam's first moment with its bias correction, the preconditioner already in the coordinates."""
    return Coefficients(rate=rate, l2=0.0, decay=0.1, momentum=0.9, tau=0.9, a=1 / (1 - 0.9**s), n=0.0)


def joined(first: Coefficients, second: Coefficients, sizes: tuple[int, int]) -> Coefficients:
    """Two parameter groups: each coefficient a vector over the coordinates."""
    both = (
        torch.cat([torch.full((d,), float(x), dtype=torch.float64) for d, x in zip(sizes, pair, strict=True)])
        for pair in zip(first, second, strict=True)
    )
    return Coefficients(*both)


P = 6
DIAGONAL = torch.tensor([0.3, 2.0, 0.7, 1.5, 0.2, 1.1], dtype=torch.float64)
RULES: dict[str, Callable[[int], Coefficients]] = {
    "plain": lambda t: plain(0.1 + 0.05 * t),
    "momentum": lambda t: heavy(0.1 + 0.02 * t, tau=0.0 if t == 0 else 0.1),
    "nesterov": lambda t: nesterov(0.1 + 0.02 * t),
    "adam": lambda t: adam(0.1 + 0.02 * t, t + 1),
    "plain, own diagonal": lambda t: plain(0.1 + 0.05 * t)._replace(P=DIAGONAL if t % 2 else 0.5),
    "adam, own diagonal": lambda t: adam(0.1 + 0.02 * t, t + 1)._replace(P=DIAGONAL + 0.1 * t),
    "nesterov, own diagonal": lambda t: nesterov(0.1 + 0.02 * t)._replace(P=DIAGONAL.roll(t)),
    "groups": lambda t: joined(heavy(0.1 + 0.02 * t), nesterov(0.2 - 0.01 * t), (2, P - 2)),
    "plain, then momentum": lambda t: heavy(0.1) if t >= 5 else plain(0.1 + 0.05 * t),
    "now and then momentum": lambda t: heavy(0.2) if t % 4 == 2 else plain(0.1 + 0.05 * t),
}
SIZES = (3, 1, 4, 2, 1, 5, 2, 3)  # rows of each step


def random_step(
    g: torch.Generator, rows: int, k: Coefficients, *, clipped: bool = False, curvature: int | None = None
) -> Step:
    """One step; `curvature` rows of its own or (None) the gradients'; every fifth weight is 0."""
    G = torch.randn(rows, P, generator=g, dtype=torch.float64)
    w = torch.rand(rows, generator=g, dtype=torch.float64) + 0.2
    w[4::5] = 0.0
    V = None if curvature is None else torch.randn(curvature, P, generator=g, dtype=torch.float64)
    n = w @ G
    clip = 0.6 if clipped else 1.0
    return Step(G, w, k, V, clip, n.norm().item(), G @ n, None if V is None else V @ n)


def random_steps(
    rule: str, *, clipped: bool = False, curvature: bool = False, sizes: Sequence[int] = SIZES, seed: int = 0
) -> list[Step]:
    """Steps of unequal size under one of `RULES`; with `clipped` every second one is; with `curvature` V is given."""
    g = torch.Generator().manual_seed(seed)
    own = [t % 4 + 1 if curvature else None for t in range(len(sizes))]
    return [
        random_step(g, rows, RULES[rule](t), clipped=clipped and t % 2 == 0, curvature=own[t])
        for t, rows in enumerate(sizes)
    ]


def recorded(step: Step, contraction: Contraction) -> Recorded:
    """The step for the oracle, with H̃ = Vᵀ (I + γ V diag(α) Vᵀ)⁻¹ V by an explicit inverse."""
    rate, l2, decay, momentum, tau, a, n, diagonal = (
        torch.as_tensor(x, dtype=torch.float64).expand(P) for x in step.coefficients
    )
    V = torch.diag(step.w.sqrt()) @ step.G if step.V is None else step.V
    alpha = step.clip * rate * diagonal * ((1 - tau) * a + n)
    assert contraction != "when_expanding"
    gamma = 0.0 if contraction == "never" else contraction
    factor = 1 / (1 - momentum) if gamma == "always" else torch.full((P,), gamma, dtype=torch.float64)
    inverse = torch.linalg.inv(torch.eye(len(V), dtype=torch.float64) + V @ torch.diag(factor * alpha) @ V.T)
    max_norm = NEVER if step.clip >= 1 else step.clip * (step.norm + 1e-6)
    return Recorded(step.G, step.w, V.T @ inverse @ V, max_norm, rate, l2, decay, momentum, tau, a, n, diagonal)


def queries(count: int = 3) -> Tensor:
    """(Q, p)."""
    return torch.randn(count, P, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


WINDOWS = (0, 3, 5, 8)  # where they begin, and the end
SHARING = (
    3,
    2,
    4,
    2,
    3,
    5,
    2,
    3,
)  # rows of each step of theirs: where there is one, clipping leaves next to nothing of it


def _shared_rows(p: int, g: torch.Generator) -> Tensor:
    Q = torch.linalg.qr(torch.randn(p, p, generator=g, dtype=torch.float64)).Q
    V: Tensor = Q[:4] * torch.tensor([[1.5], [1.0], [0.4], [0.1]], dtype=torch.float64)
    return V


def window_steps(rule: str, clipped: bool, p: int) -> list[Step]:
    """Steps of three windows, each with four orthogonal curvature rows that its steps share."""
    g, steps = torch.Generator().manual_seed(4), list[Step]()
    for lo, hi in pairwise(WINDOWS):
        V = _shared_rows(p, g)
        for t in range(lo, hi):
            G = torch.randn(SHARING[t], p, generator=g, dtype=torch.float64) / p**0.5
            w = torch.rand(SHARING[t], generator=g, dtype=torch.float64) + 0.2
            n, clip = w @ G, 0.6 if clipped and t % 2 == 0 else 1.0
            steps.append(Step(G, w, RULES[rule](t), V, clip, n.norm().item(), G @ n, V @ n, orthogonal=True))
    return steps
