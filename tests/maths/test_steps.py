"""Clipping, the implicit form and the limits of stability, each against its definition."""

import math
from typing import Any

import pytest
import torch
from tests.maths.examples import DIAGONAL, P, adam, heavy, joined, nesterov, plain, queries, random_step
from tests.support.oracles import assert_close, assert_same, expands
from torch import Tensor

from backstory.errors import UsageError
from backstory.maths import steps
from backstory.maths.steps import (
    Coefficients,
    Contraction,
    Step,
    clipped_curvature,
    clipped_gradients,
    curvature_rows,
    damping,
    growth,
    implicit,
    loss_divisor,
    squares,
)

GROUPS = joined(heavy(0.3), nesterov(0.1), (2, P - 2))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def derivative_of_clipping(gradient: Tensor, max_norm: float) -> Tensor:
    """∂(clipped)/∂(gradient) by autograd through the lines of `clip_grad_norm_`."""

    def clipped(x: Tensor) -> Tensor:
        return x * torch.clamp(max_norm / (torch.linalg.vector_norm(x) + 1e-6), max=1.0)

    J: Tensor = torch.autograd.functional.jacobian(clipped, gradient)
    return J


@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["large", "small: ρ matters"])
def test_clipping_in_a_subspace_is_clipping_in_full_space(size: float) -> None:
    """Rows keep 4 of 11 coordinates, and ⟨g, ∇L⟩ and ‖∇L‖ of all of them."""
    G, V, basis = size * normal(5, 11), normal(3, 11, seed=1), normal(11, 4, seed=2)
    w = torch.rand(5, generator=generator(3), dtype=torch.float64)
    whole = w @ G
    norm = whole.norm().item()
    max_norm = 0.3 * norm
    J = derivative_of_clipping(whole, max_norm)
    step = Step(G @ basis, w, plain(0.1), V @ basis, max_norm / (norm + 1e-6), norm, G @ whole, V @ whole)
    causes = "An error of 1e-6/‖∇L‖ is a missing ρ; ratios near 1/0.3 a missing c."
    assert_close(clipped_gradients(step), G @ J.T @ basis, 1e-12, causes)
    assert_close(clipped_curvature(step), V @ J.T @ basis, 1e-12, causes)
    own = step._replace(V=None)
    assert_close(clipped_curvature(own), w.sqrt()[:, None] * (G @ J.T @ basis), 1e-12, causes)


def test_an_unclipped_step_keeps_its_rows() -> None:
    step = random_step(generator(), 3, plain(0.1), curvature=2)
    assert clipped_gradients(step) is step.G
    assert clipped_curvature(step) is step.V


def test_without_curvature_rows_the_curvature_is_the_empirical_fisher() -> None:
    step = random_step(generator(), 7, plain(0.1))
    fisher = torch.stack([w * torch.outer(g, g) for w, g in zip(step.w, step.G, strict=True)]).sum(0)
    V = curvature_rows(step)
    assert_close(V.T @ V, fisher, 1e-13, "Ratios of w: a weight squared or forgotten.")


@pytest.mark.parametrize("gamma", [0.5, 1.0, None], ids=["0.5", "1.0", "always"])
@pytest.mark.parametrize(
    "k",
    [plain(0.2), heavy(0.2), nesterov(0.3), GROUPS, adam(0.2, 3)._replace(P=DIAGONAL), plain(0.2)._replace(P=0.3)],
    ids=["plain", "heavy", "nesterov", "groups", "own diagonal", "a number as diagonal"],
)
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
def test_the_implicit_curvature_by_an_explicit_inverse(k: Coefficients, gamma: float | None, clipped: bool) -> None:
    """H̃ = Vᵀ (I + γ V diag(α) Vᵀ)⁻¹ V, which is also H (I + γ diag(α) H)⁻¹."""
    step = random_step(generator(1), 4, k, clipped=clipped, curvature=9)  # more rows than coordinates
    V = curvature_rows(step)
    actual = V.T @ implicit(step, gamma or "always", V)
    rate, _, _, mu, tau, a, n, diagonal = (torch.as_tensor(x, dtype=torch.float64).expand(P) for x in k)
    alpha = (0.6 if clipped else 1.0) * rate * diagonal * ((1 - tau) * a + n)
    D = torch.diag((1 / (1 - mu) if gamma is None else gamma) * alpha)
    small = V.T @ torch.linalg.inv(torch.eye(9, dtype=torch.float64) + V @ D @ V.T) @ V
    H = V.T @ V
    large = H @ torch.linalg.inv(torch.eye(P, dtype=torch.float64) + D @ H)
    assert_close(actual, small, 1e-11, "1/(1-μ) is the default γ; c belongs into α.")
    assert_close(actual, large, 1e-11)


def test_never_is_the_literal_form() -> None:
    step = random_step(generator(), 3, plain(0.2))
    X = normal(3, 2)
    assert implicit(step, "never", X) is X
    assert_same(implicit(step._replace(coefficients=GROUPS), "never", X), X, P)


@pytest.mark.parametrize("contraction", ["always", 0.7, "when_expanding"])
@pytest.mark.parametrize("k", [plain(3.0), heavy(0.3), GROUPS], ids=["plain", "heavy", "groups"])
def test_orthogonal_rows_need_no_factorisation(k: Coefficients, contraction: Contraction) -> None:
    """The same numbers as without the flag, for the implicit form and for the growth."""
    Q = torch.linalg.qr(normal(P, 4)).Q.T * torch.tensor([[2.0], [1.0], [0.5], [0.1]], dtype=torch.float64)
    step = random_step(generator(1), 4, k)._replace(V=Q)
    marked, X = step._replace(orthogonal=True), normal(4, 3)
    assert_close(implicit(marked, contraction, X), implicit(step, contraction, X), 1e-12)
    assert growth(marked) == pytest.approx(growth(step), rel=1e-12)
    assert_close(squares(marked), torch.tensor([4.0, 1.0, 0.25, 0.01], dtype=torch.float64), 1e-12)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Coefficients]] = {
    "plain": ({"lr": 0.1}, Coefficients(0.1, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)),
    "heavy ball 0.5": ({"lr": 0.1, "momentum": 0.5}, Coefficients(0.1, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0)),
    "heavy ball 0.9": ({"lr": 0.1, "momentum": 0.9}, Coefficients(0.1, 0.0, 0.0, 0.9, 0.0, 1.0, 0.0)),
    "dampening": (
        {"lr": 0.2, "momentum": 0.9, "dampening": 0.6},
        Coefficients(0.2, 0.0, 0.0, 0.9, 0.6, 1.0, 0.0),
    ),
    "nesterov 0.5": (
        {"lr": 0.1, "momentum": 0.5, "nesterov": True},
        Coefficients(0.1, 0.0, 0.0, 0.5, 0.0, 0.5, 1.0),
    ),
    "nesterov 0.9": (
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        Coefficients(0.1, 0.0, 0.0, 0.9, 0.0, 0.9, 1.0),
    ),
}


def with_growth(target: float, V: Tensor, k: Coefficients) -> Tensor:
    """The rows V scaled so that `growth` reports `target`."""
    factor = target / growth(Step(V, torch.ones(len(V), dtype=torch.float64), k, V))
    return V * math.sqrt(factor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_growth_is_above_one_exactly_where_torch_sgd_runs_away(name: str) -> None:
    settings, k = OPTIMIZERS[name]
    V = torch.ones(1, 1, dtype=torch.float64)
    assert expands([settings], with_growth(1.01, V, k)), "growth is too large: torch still converges above 1"
    assert not expands([settings], with_growth(0.99, V, k)), "growth is too small: torch runs away below 1"


@pytest.mark.parametrize("pair", [("plain", "heavy ball 0.9"), ("dampening", "nesterov 0.9")], ids="+".join)
def test_growth_with_parameter_groups(pair: tuple[str, str]) -> None:
    (one, k_one), (two, k_two) = OPTIMIZERS[pair[0]], OPTIMIZERS[pair[1]]
    k = joined(k_one, k_two, (1, 2))
    V = normal(2, 3, seed=5)
    settings = [one, two, two]
    assert expands(settings, with_growth(1.02, V, k)), "growth is too large: torch still converges above 1"
    assert not expands(settings, with_growth(0.98, V, k)), "growth is too small: torch runs away below 1"


@pytest.mark.parametrize("name", ["plain", "heavy ball 0.9", "nesterov 0.5"])
def test_growth_with_a_diagonal_is_that_of_single_rates(name: str) -> None:
    """η P as torch's SGD would have it, one parameter group for each coordinate."""
    settings, k = OPTIMIZERS[name]
    diagonal = torch.tensor([0.3, 2.0, 0.7], dtype=torch.float64)
    own = k._replace(rate=k.rate / 100, P=100 * diagonal)  # where P is forgotten, nothing seems to expand
    V = normal(2, 3, seed=5)
    each = [{**settings, "lr": settings["lr"] * x} for x in diagonal.tolist()]
    assert expands(each, with_growth(1.02, V, own)), "growth is too large: torch still converges above 1"
    assert not expands(each, with_growth(0.98, V, own)), "growth is too small: torch runs away below 1"
    for target in (0.98, 1.02):
        step = Step(V, torch.ones(2, dtype=torch.float64), own, with_growth(target, V, own))
        assert steps.expands(step) == (target > 1)


def test_growth_of_adams_first_moment() -> None:
    """τ = β₁ and a = 1/(1−β₁) at the first update: together as heavy as heavy ball divided by (1−β₁) a = 1."""
    V = queries(2)
    w = torch.ones(2, dtype=torch.float64)
    first = Coefficients(0.1, 0.0, 0.0, 0.9, 0.9, 10.0, 0.0)
    ball = Coefficients(0.1, 0.0, 0.0, 0.9, 0.0, 1.0, 0.0)
    assert growth(Step(V, w, first, V)) == pytest.approx(growth(Step(V, w, ball, V)), rel=1e-12)


def test_growth_counts_clipping_and_is_zero_without_rows() -> None:
    step = random_step(generator(), 3, plain(0.2))
    assert growth(step._replace(clip=0.25)) == pytest.approx(growth(step) / 4)
    assert growth(random_step(generator(), 0, plain(0.2))) == 0.0


def test_growth_of_many_rows_is_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power iteration against the direct eigenvalue, with parameter groups."""
    g = torch.Generator().manual_seed(0)
    V = torch.randn(200, 30, generator=g, dtype=torch.float64) * torch.linspace(1, 3, 30, dtype=torch.float64)
    rate = torch.cat([torch.full((10,), 0.02), torch.full((20,), 0.05)]).double()
    k = Coefficients(rate, 0.0, 0.0, 0.9, 0.0, 1.0, 0.0)
    step = Step(V[:1], torch.ones(1, dtype=torch.float64), k, V=V)
    by_iteration = growth(step)
    monkeypatch.setattr(steps, "DIRECT_ROWS", 10_000)
    assert by_iteration == pytest.approx(growth(step), rel=0.02)
    assert by_iteration <= growth(step) * (1 + 1e-12)
    assert steps.expands(step) == (growth(step) > 1)


def test_expanding_is_literal_where_a_step_cannot_expand_and_damped_where_it_could() -> None:
    V = torch.eye(4, dtype=torch.float64)
    for rate, expected in ((0.5, 0.0), (50.0, 50.0 / (1 - 0.9))):
        k = Coefficients(rate, 0.0, 0.0, 0.9, 0.0, 1.0, 0.0)
        step = Step(V[:1], torch.ones(1, dtype=torch.float64), k, V=V)
        assert steps.expands(step) == (expected > 0)
        assert damping(step, "when_expanding") == pytest.approx(expected)


def test_clipping_takes_out_only_the_recorded_share_of_the_gradient() -> None:
    """With half of ‖∇L‖² in parameters that are not recorded, J along n is c (1 − ρ/2), not c (1 − ρ)."""
    g = torch.Generator().manual_seed(0)
    G, w = torch.randn(3, 4, generator=g, dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    n = w @ G
    k = Coefficients(0.1, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    norm = float(n.norm()) * 2**0.5
    step = Step(G, w, k, clip=0.5, norm=norm, dot_g=G @ n, share=0.5)
    J = 0.5 * (torch.eye(4, dtype=torch.float64) - norm / (norm + 1e-6) * torch.outer(n, n) / norm**2)
    torch.testing.assert_close(clipped_gradients(step), G @ J.T, rtol=1e-12, atol=1e-14)


def test_what_the_sum_of_losses_is_divided_by() -> None:
    tokens = torch.tensor([3, 4])
    assert [loss_divisor(r, 2, tokens) for r in ("mean", "sum", "token-mean")] == [2, 1, 7]
    with pytest.raises(UsageError, match="no token in the batch has a loss"):
        loss_divisor("token-mean", 2, torch.zeros(2))
