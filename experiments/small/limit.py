r"""The study of a theorem: the influence function is what expected leave-one-out tends to, for long training.

    ratio(T) = T · E_{t_s}[TSLOO] / influence function  →  1        a convex model, a constant rate

for each model and number of steps T, with the standard error over the seeds.

The paper's theorem (appendix on expected LOO): a sample z* is added to one of T batches, drawn uniformly. Then

    T · E_{t_s}[TSLOO]  →  w ⟨∇ℓ(θ*, q), H̄⁻¹ ∇ℓ(θ*, z*)⟩        H̄: mean Hessian of a step, θ*: the optimum

for large T: with a constant rate, what a sample did 1/(η λ_min) steps ago is forgotten, so that the geometric series of
(I − η H̄)^s saturates, and only steps near the optimum count. Here the left side comes from T + 1 training runs for each
seed (all t_s, none left out), with the seed's initialisation and order; the right side from Newton's method.
What remains beside 1 at large T is of the order of the rate: SGD's noise around the optimum.

Shapes:  N samples, p dimensions, B in a batch, T steps, R = T + 1 runs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from backstory.errors import UsageError
from experiments.harness import Say

MODELS = ("linear", "logistic")
D = torch.float64


@dataclass(frozen=True)
class LimitCurve:
    """Ratios of T · expected TSLOO to the influence function, for growing T."""

    model: str
    steps: tuple[int, ...]
    ratios: tuple[float, ...]
    errors: tuple[float, ...]  # standard errors over the seeds
    expected: tuple[float, ...]  # T · E[TSLOO]
    influence: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Problem(NamedTuple):
    """Regularised regression: mean loss of the data + λ/2 ‖θ‖²; the sample z* and the query are apart from it."""

    model: str
    x: Tensor  # (N, p)
    y: Tensor  # (N,) numbers, or −1 and 1
    sample: tuple[Tensor, Tensor]
    query: tuple[Tensor, Tensor]
    l2: float


def large_t_limit(
    model: str = "logistic",
    *,
    steps: Sequence[int] = (10, 30, 100, 300, 1000),
    seeds: Sequence[int] = tuple(range(8)),
    n: int = 64,
    dim: int = 4,
    batch: int = 16,
    rate: float = 0.1,
    l2: float = 0.1,
    data_seed: int = 0,
) -> LimitCurve:
    """The curve for one convex model; every seed has its own initialisation and order."""
    if model not in MODELS:
        raise UsageError(f"model must be one of {', '.join(MODELS)}, got {model!r}.")
    if len(seeds) < 2 or batch > n:
        raise UsageError(
            f"the study needs 2 or more seeds and batch ≤ n, got {len(seeds)} seeds, batch={batch} and n={n}."
        )
    made = problem(model, n, dim, l2, data_seed)
    influence = influence_function(made) / batch
    result = torch.tensor([[T * float(tsloo_of_all(made, T, batch, rate, s).mean()) for s in seeds] for T in steps])
    ratios = result / influence
    return LimitCurve(
        model,
        tuple(steps),
        tuple(ratios.mean(1).tolist()),
        tuple((ratios.std(1) / len(seeds) ** 0.5).tolist()),
        tuple(result.mean(1).tolist()),
        influence,
    )


def problem(model: str, n: int, dim: int, l2: float, seed: int) -> Problem:
    """Gaussian inputs; targets from a random direction with noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 2, dim, generator=g, dtype=D)
    truth = torch.randn(dim, generator=g, dtype=D)
    y = x @ truth + 0.5 * torch.randn(n + 2, generator=g, dtype=D)
    y = y if model == "linear" else torch.where(y > 0, 1.0, -1.0).to(D)
    return Problem(model, x[:n], y[:n], (x[n], y[n]), (x[n + 1], y[n + 1]), l2)


def influence_function(p: Problem) -> float:
    """⟨∇ℓ(θ*, q), H̄⁻¹ ∇ℓ(θ*, z*)⟩ at the optimum θ*, which Newton's method finds."""
    theta = torch.zeros(p.x.shape[1], dtype=D)
    for _ in range(50):
        gradient = p.x.T @ _slope(p.model, p.x @ theta, p.y) / len(p.y) + p.l2 * theta
        theta = theta - torch.linalg.solve(_hessian(p, theta), gradient)
    (xz, yz), (xq, yq) = p.sample, p.query
    at_sample = _slope(p.model, xz @ theta, yz) * xz
    at_query = _slope(p.model, xq @ theta, yq) * xq
    return float(at_query @ torch.linalg.solve(_hessian(p, theta), at_sample))


def tsloo_of_all(p: Problem, steps: int, batch: int, rate: float, seed: int) -> Tensor:
    """TSLOO (T,) of z* used once, at each step of one run: R = T + 1 runs side by side, the last without z*."""
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(1, p.x.shape[1], generator=g, dtype=D).expand(steps + 1, -1).clone()  # (R, p)
    xz, yz = p.sample
    order = torch.empty(0, dtype=torch.long)
    for t in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(p.y), generator=g)
        b, order = order[:batch], order[batch:]
        gradient = _slope(p.model, theta @ p.x[b].T, p.y[b]) @ p.x[b] / batch + p.l2 * theta  # (R, p)
        gradient[t] += _slope(p.model, theta[t] @ xz, yz) * xz / batch
        theta -= rate * gradient
    xq, yq = p.query
    losses = _loss(p.model, theta @ xq, yq)  # (R,)
    return losses[-1] - losses[:-1]


def _loss(model: str, output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).square() if model == "linear" else softplus(-y * output)


def _slope(model: str, output: Tensor, y: Tensor) -> Tensor:
    """∂ℓ/∂output."""
    return output - y if model == "linear" else -y * logsigmoid(-y * output).exp()


def _hessian(p: Problem, theta: Tensor) -> Tensor:
    output = p.x @ theta
    bend = torch.ones_like(output) if p.model == "linear" else torch.sigmoid(output) * torch.sigmoid(-output)
    return p.x.T @ (bend[:, None] * p.x) / len(p.y) + p.l2 * torch.eye(p.x.shape[1], dtype=D)


STEPS = (10, 30, 100, 300, 1000)


def study(
    models: Sequence[str] = MODELS,
    steps: Sequence[int] = STEPS,
    seeds: Sequence[int] = tuple(range(8)),
    *,
    rate: float = 0.1,
    batch: int = 16,
    say: Say | None = None,
) -> dict[str, Any]:
    """One curve for each model, as plain values."""
    if not steps or min(steps) < 1 or rate <= 0:
        raise UsageError(f"steps and rate must be above 0, got steps={list(steps)} and rate={rate}.")
    curves = []
    for model in models:
        points = []
        for done, T in enumerate(sorted(steps)):
            points.append(_point(model, T, seeds, rate, batch))
            if say is not None:
                say(f"{model}: retrain", done + 1, len(steps))
        curves.append({"model": model, "points": points})
    return {"curves": curves, "seeds": list(seeds), "rate": rate, "batch": batch}


def _point(model: str, T: int, seeds: Sequence[int], rate: float, batch: int) -> dict[str, Any]:
    result = large_t_limit(model, steps=(T,), seeds=seeds, rate=rate, batch=batch)
    return {
        "steps": T,
        "ratio": result.ratios[0],
        "error": result.errors[0],
        "expected": result.expected[0],
        "influence": result.influence,
    }
