r"""The paper's simplified curves beside what the sweep measures, step by step.

Measured, from M random probes z of ±1 carried backward by the adjoint (A_t = ∂θ_T/∂θ_{t+1}):

    tr A_t  = E ⟨z, Aᵀ z⟩,      ‖A_t‖²_F = E ‖Aᵀ z‖²,      ‖e‖² = E ⟨z, e⟩²       (exact with the p unit vectors: `probes=None`)

The paper's simplified setting takes the gradients of all steps as orthogonal, and new gradients as Gaussian. With
η̄ = c η P ((1−τ) a/(1−μ) + n), the total effect of a step's gradient, and σ_r = ‖V_r‖² weighted by η̄ for each curvature row of later steps,

    tr = p − Σ σ_r,             ‖A‖²_F = p − 2 Σ σ_r + Σ σ_r²,             E‖e‖/η = w ‖g‖ √(‖A‖²_F / p)

Where Σ σ_r passes p the rows cannot be orthogonal, and the simplified trace, below 0, says nothing.

All norms are in the run's coordinates. Traces are shares of p.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backstory.errors import UsageError
from backstory.insight.phases import Curve
from backstory.maths.adjoint import Adjoint
from backstory.maths.steps import Step, curvature_rows, own_curvature
from backstory.results import figures
from backstory.results.figures import ACCENT, WARM, Figure, figure, line, smoothed, thinned
from backstory.results.result import frame
from backstory.results.row import plain
from backstory.run.embed import ContractionChoice, Progress
from backstory.run.run import Run
from backstory.run.sweep import backward
from backstory.store import RunStore

UNIT = "norms in the run's coordinates, embeddings per unit of learning rate; traces as shares of the dimensions"


@dataclass(frozen=True)
class Analytic:
    """Curves over the steps before `at`, (T,) each."""

    at: int
    probes: int | None  # None: exact
    gradient_norm: Curve  # mean ‖g‖ of the step's occurrences
    trace: Curve  # tr A / p after the step, measured
    trace_simple: Curve  # in the paper's simplified setting
    embedding_norm: Curve  # √ of the mean ‖e‖² of the step's occurrences, by rate, measured
    embedding_norm_simple: Curve  # in the paper's simplified setting

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values: dict[str, Any] = plain({f.name: getattr(self, f.name) for f in fields(self)})
        return {**values, "unit": UNIT}

    def drawings(self) -> dict[str, Figure]:
        """Gradient norm, trace and embedding norm, measured and simplified."""
        curves = {
            "‖g‖": [self.gradient_norm],
            "trace of the propagator, share of p": [self.trace, self.trace_simple],
            "‖e‖ / learning rate": [self.embedding_norm, self.embedding_norm_simple],
        }
        return {name: _drawn(name, both) for name, both in curves.items()}

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each step."""
        curves = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("at", "probes")}
        return frame({"step": np.arange(self.at), **curves})


def _drawn(name: str, curves: list[Curve]) -> Figure:
    lines = []
    for label, colour, curve in zip(("measured", "simplified"), (ACCENT, WARM), curves, strict=False):
        x, y = thinned(figures.numbers(curve.tolist()))
        lines.append(line(x, smoothed(y), label, colour))
    return figure(lines, "training step", name, height=320)


def analytic(
    run: Run,
    at: int | str = "final",
    *,
    probes: int | None = 16,
    contraction: ContractionChoice = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Analytic:
    """Measured and simplified curves up to `at`, by one sweep with `probes` random queries (None: exact, p of them)."""
    step, p = run.step_of(at), run.width
    if probes is not None and probes < 1:
        raise UsageError(f"probes must be at least 1, or None for all {p} dimensions, got {probes}.")
    z = torch.eye(p) if probes is None else _signs(probes, p, seed)
    share = 1.0 if probes is None else 1 / probes  # unit vectors are summed, random ones averaged
    rate = run.steps(0, step).groups["rate"].max(1)
    adjoint, out = Adjoint(z, contraction=run.form(contraction)), np.zeros((5, step))
    spent = np.zeros(2)  # Σ σ and Σ σ² of the steps after
    mu: float | Tensor | None = None
    for chunk in backward(RunStore.open(run.path), step, dtype=torch.float32):
        for t, s in reversed(list(enumerate(map(own_curvature, chunk.steps), chunk.first_step))):
            trace = share * float((adjoint.x_theta * z).sum())
            squares = share * adjoint.influence(s).double().square().sum(0)  # (B,) ‖e‖²
            total = _total(s, s.coefficients.momentum if mu is None else mu)
            out[:, t] = _of_step(s, total, trace, squares, spent, p, float(rate[t]))
            spent, mu = spent + _sigmas(s, total), s.coefficients.momentum
        if progress is not None:
            progress(step - chunk.first_step, step)
    return Analytic(step, probes, *out)


def _of_step(
    step: Step, total: float | Tensor, trace: float, squares: Tensor, spent: Any, p: int, rate: float
) -> list[float]:
    """The five curves at one step."""
    by_rate = 1 / rate if rate > 0 else float("nan")
    left = max(0.0, p - 2 * float(spent[0]) + float(spent[1])) / p  # ‖A‖²_F / p, simplified
    direct = step.w[:, None] * step.G * total  # (B, p) w η̄ g
    return [
        float(step.G.norm(dim=1).mean()),
        trace / p,
        1 - float(spent[0]) / p,
        float(squares.mean().sqrt()) * by_rate,
        float(direct.square().sum(1).mean().sqrt()) * left**0.5 * by_rate,
    ]


def _total(step: Step, mu: float | Tensor) -> float | Tensor:
    """η̄: what a unit of the loss's gradient moves θ by in all; μ is that of the step after, which begins to pay out."""
    k = step.coefficients
    return step.clip * k.pace * ((1 - k.tau) * k.a / (1 - mu) + k.n)


def _sigmas(step: Step, total: float | Tensor) -> Curve:
    """Σ σ and Σ σ² over the step's curvature rows."""
    sigma = (curvature_rows(step).square() * total).sum(1).double()
    return np.array([float(sigma.sum()), float(sigma.square().sum())])


def _signs(n: int, p: int, seed: int) -> Tensor:
    return torch.randint(0, 2, (n, p), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1
