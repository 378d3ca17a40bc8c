"""Coefficients that are read from torch's optimizers, by taking the steps with them."""

import pytest
import torch
from experiments.fidelity.updates import Update, coefficients, factored, second_moments
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from backstory.errors import UsageError


def model() -> nn.Module:
    made = nn.Linear(3, 2).double()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.arange(1.0, p.numel() + 1).reshape(p.shape) / 7)
    return made


def gradient(t: int, p: Tensor) -> Tensor:
    return torch.sin(torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape) + t) + 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.2, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
        {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-3},
    ],
    ids=["sgd", "decay", "momentum", "nesterov", "adamw"],
)
def test_the_equation_with_these_numbers_is_torchs_step(settings: dict[str, float]) -> None:
    """u = ∇L + λθ;  m ← μm + (1−τ)u;  θ ← (1−ηλ')θ − ηP(am + nu)."""
    made = model()
    parameters = list(made.parameters())
    optimizer: Optimizer = (AdamW if "betas" in settings else SGD)(parameters, **settings)  # type: ignore[arg-type]
    theta = {n: p.detach().clone() for n, p in made.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in theta.items()}
    for t in range(4):
        k = coefficients(optimizer)
        for p in parameters:
            p.grad = gradient(t, p)
        optimizer.step()
        P = k._replace(v=second_moments(optimizer, made)).diagonal()
        for n in theta:
            u = gradient(t, theta[n]) + k.l2 * theta[n]
            m[n] = k.momentum * m[n] + (1 - k.tau) * u
            step = k.rate * (k.a * m[n] + k.n * u)
            theta[n] = (1 - k.rate * k.decay) * theta[n] - (step if P is None else P[n] * step)
    for n, p in made.named_parameters():
        assert torch.allclose(theta[n], p, rtol=1e-12), n


def test_a_factored_moment_keeps_the_sums_of_rows_and_columns() -> None:
    v = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = factored(v)
    assert actual.shape == v.shape
    assert torch.allclose(actual.sum((1, 2)), v.sum((1, 2)))
    assert torch.allclose(actual.sum(0), v.sum(0))
    assert torch.linalg.matrix_rank(actual.flatten(1)) == 1
    assert torch.equal(factored(v[0, 0]), v[0, 0])
    assert torch.equal(factored(torch.zeros(2, 2)), torch.zeros(2, 2))


def test_a_proxy_is_the_plain_step_of_the_same_rate() -> None:
    k = Update(0.1, 0.2, 0.3, 0.9, 0.9, 2.0, 0.0, {"x": torch.ones(1)}, 1e-8)
    assert k.modelled("proxy") == Update(0.1)
    assert Update(0.1).plain
    assert not k.plain
    with pytest.raises(UsageError, match="aware, factored, proxy"):
        k.modelled("adam")


@pytest.mark.parametrize(
    ("k", "expected"),
    [(Update(0.1), 2.0), (Update(0.1, momentum=0.9), 3.8), (Update(0.1, momentum=0.5, a=0.5, n=1.0), 1.5)],
    ids=["plain", "heavy ball", "nesterov"],
)
def test_the_limit_is_where_a_step_begins_to_swing(k: Update, expected: float) -> None:
    assert k.limit == pytest.approx(expected)
    for factor, grows in ((0.99, False), (1.01, True)):
        h = factor * expected / k.rate
        theta, m = 1.0, 0.0
        for _ in range(2000):
            m = k.momentum * m + h * theta
            theta -= k.rate * (k.a * m + k.n * h * theta)
        assert (abs(theta) > 1) == grows


def test_other_optimizers_are_refused() -> None:
    parameters = list(model().parameters())
    for optimizer in (Adam(parameters), SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)):
        with pytest.raises(UsageError, match="must be SGD or AdamW with one"):
            coefficients(optimizer)
    with pytest.raises(UsageError, match="amsgrad"):
        coefficients(AdamW(parameters, amsgrad=True))
