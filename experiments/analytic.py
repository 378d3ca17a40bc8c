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

from ..errors import UsageError
from ..maths.adjoint import Adjoint
from ..maths.steps import Step, curvature_rows
from ..run.embed import Asked, Progress
from ..run.run import Run
from ..run.sweep import backward
from ..run.windows import refuse_compressed
from . import plots
from .notebook import InNotebook
from .shapes import Curve

UNIT = "norms in the run's coordinates, embeddings per unit of learning rate; traces as shares of the dimensions"


@dataclass(frozen=True)
class Analytic(InNotebook):
    """Curves over the steps before `at`, (T,) each."""

    at: int
    probes: int | None  # None: exact
    gradient_norm: Curve  # mean ‖g‖ of the step's occurrences
    trace: Curve  # tr A / p after the step, measured
    trace_simple: Curve  # in the paper's simplified setting
    embedding_norm: Curve  # √ of the mean ‖e‖² of the step's occurrences, by rate, measured
    embedding_norm_simple: Curve  # in the paper's simplified setting

    @property
    def said(self) -> tuple[str, ...]:
        """Its unit: these are no influences."""
        return (UNIT,)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}, "unit": UNIT}

    def figure(self) -> Any:
        """Gradient norm, trace and embedding norm, measured and simplified."""
        titles = ("Gradient norm", "Trace of the propagator", "Norm of an embedding, by learning rate")
        drawn = plots.figure(titles, "training step", ("‖g‖", "share of p", "‖e‖ / rate"))
        curves = [
            (1, self.gradient_norm, "measured"), (2, self.trace, "measured"), (2, self.trace_simple, "simplified"),
            (3, self.embedding_norm, "measured"), (3, self.embedding_norm_simple, "simplified"),
        ]  # fmt: skip
        for row, curve, name in curves:
            colour = plots.COLOURS[0 if name == "measured" else 1]
            drawn.add_scatter(
                y=curve.tolist(),
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=row == 2,
                line={"color": colour},
                row=row,
                col=1,
            )
        return drawn

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each step."""
        curves = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("at", "probes")}
        return plots.frame({"step": np.arange(self.at), **curves})


def analytic(
    run: Run,
    at: int | str = "final",
    *,
    probes: int | None = 16,
    contraction: Asked = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Analytic:
    """Measured and simplified curves up to `at`, by one sweep with `probes` random queries (None: exact, p of them)."""
    refuse_compressed(run.store, "the paper's simplified curve")
    step, p = run.step_of(at), run.store.width
    if probes is not None and probes < 1:
        raise UsageError(f"found probes={probes}; expected at least 1, or None for all {p} dimensions.")
    z = torch.eye(p) if probes is None else _signs(probes, p, seed)
    share = 1.0 if probes is None else 1 / probes  # unit vectors are summed, random ones averaged
    rate = run.store.steps(0, step).groups["rate"].max(1)
    adjoint, out = Adjoint(z, contraction=run.form(contraction)), np.zeros((5, step))
    spent = np.zeros(2)  # Σ σ and Σ σ² of the steps after
    mu: float | Tensor | None = None
    for chunk in backward(run.store, step, dtype=torch.float32):
        for t, s in reversed(list(enumerate(chunk.steps, chunk.first_step))):
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
