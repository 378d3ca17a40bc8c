r"""One optimizer step, as torch takes it, in numbers.

    u_t     = c_t ∇L_t(θ_t) + λ θ_t                      clipping before the optimizer, L2 decay λ inside it
    m_{t+1} = μ m_t + (1−τ_t) u_t
    θ_{t+1} = (1 − η_t λ') θ_t − η_t P_t (a_t m_{t+1} + n_t u_t)

P is the optimizer's diagonal, frozen at what it was in the run (Adam; 1 for SGD, and in coordinates that hold it already).
Parameter groups make every coefficient a diagonal, so each is either a number (one group) or a vector
over the kept coordinates. They always stand on the right of a propagator: they scale its columns.

Clipping by norm, c = max/(‖∇L‖ + 1e-6) < 1, has the derivative J = c (I − ρ ĝĝᵀ), ρ = ‖∇L‖/(‖∇L‖+1e-6),
over *all* parameters. On rows: J g = c (g − ρ s n ⟨g,∇L⟩/‖n‖²) with n = Σ w g in the kept coordinates, the scalar ⟨g,∇L⟩
kept with each row, ‖n‖² = Σ w ⟨g,∇L⟩, and s the share of ‖∇L‖² that the recorded parameters hold. (Dividing by the
full ‖∇L‖² instead would be right only where the kept coordinates lose nothing: J would not contract along n.)

Shapes:  B rows of a step, R curvature rows, p kept coordinates.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError

Contraction = float | Literal["always", "never", "when_expanding"]  # strength of the implicit form, see `damping`
DIRECT_ROWS = 128  # up to so many rows an eigenvalue is computed directly
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by (norm + 1e-6)


class Coefficients(NamedTuple):
    """Numbers of one step; each a float, or a (p,) vector where parameter groups differ."""

    rate: float | Tensor  # η
    l2: float | Tensor  # λ, inside the optimizer
    decay: float | Tensor  # λ', decoupled
    momentum: float | Tensor  # μ
    tau: float | Tensor  # dampening of this update
    a: float | Tensor  # weight of the momentum in the update
    n: float | Tensor  # weight of the fresh gradient in the update
    P: float | Tensor = 1.0  # the optimizer's own diagonal

    @property
    def pace(self) -> float | Tensor:
        """η P: how far a unit of the optimizer's direction moves θ."""
        return self.rate * self.P


NAMES = Coefficients._fields[:-1]  # those that are read for each parameter group


class Step(NamedTuple):
    """What one step leaves behind, in the kept coordinates."""

    G: Tensor  # (B, p) gradient rows, not multiplied by w
    w: Tensor  # (B,) weights
    coefficients: Coefficients
    V: Tensor | None = None  # (R, p) curvature rows with √κ inside; None: √w G, the empirical Fisher
    clip: float = 1.0  # c, 1 = not clipped
    norm: float = 1.0  # ‖∇L‖ before clipping
    dot_g: Tensor | None = None  # (B,) ⟨g, ∇L⟩ of the gradient rows; needed where clip < 1
    dot_v: Tensor | None = None  # (R,) the same of the curvature rows
    share: float = 1.0  # of ‖∇L‖² in the recorded parameters
    orthogonal: bool = False  # whether V has orthogonal rows, the same tensor in neighbouring steps
    shared: int = 0  # how many of V's last rows are no sample's but its window's

    @property
    def alpha(self) -> float | Tensor:
        """α = c η P ((1−τ) a + n): the direct effect of the loss's gradient on θ."""
        k = self.coefficients
        return self.clip * k.pace * ((1 - k.tau) * k.a + k.n)


def loss_divisor(reduction: str, samples: int, tokens: Tensor | None = None) -> float:
    """d in L = Σ_z ℓ(z) / d, so that w_z = 1/d: the samples ("mean"), 1 ("sum"), or all tokens with a loss ("token-mean")."""
    if reduction != "token-mean":
        return float(samples) if reduction == "mean" else 1.0
    total = 0.0 if tokens is None else float(torch.as_tensor(tokens).sum())
    if total <= 0:
        raise UsageError("no token in the batch has a loss. Leave such samples out, or mask fewer of their tokens.")
    return total


def curvature_rows(step: Step) -> Tensor:
    """V with H ≈ VᵀV: (R, p)."""
    return step.w.sqrt()[:, None] * step.G if step.V is None else step.V


def own_curvature(step: Step) -> Step:
    """The step with rows of its own samples: those that it has, or where it shares a window's the gradients, the empirical Fisher."""
    if step.shared and step.V is not None:
        n = len(step.V) - step.shared
        return step._replace(V=step.V[:n], dot_v=None if step.dot_v is None else step.dot_v[:n], shared=0)
    return step._replace(V=None, dot_v=None, orthogonal=False) if step.orthogonal else step


def clipped_gradients(step: Step) -> Tensor:
    """Rows J g: (B, p)."""
    return step.G if step.clip >= 1 else _clip(step, step.G, step.dot_g)


def clipped_curvature(step: Step) -> Tensor:
    """Rows J h √κ: (R, p)."""
    if step.clip >= 1:
        return curvature_rows(step)
    if step.V is None:
        return step.w.sqrt()[:, None] * clipped_gradients(step)
    return _clip(step, step.V, step.dot_v)


def damping(step: Step, contraction: Contraction) -> float | Tensor:
    """γ α: "never" is γ = 0, the literal form; "always" is γ = 1/(1−μ), "when_expanding" that where a step could expand and 0 elsewhere."""
    if contraction == "when_expanding":
        contraction = "always" if expands(step) else "never"
    if contraction == "always":
        return step.alpha / (1 - step.coefficients.momentum)
    return 0.0 if contraction == "never" else contraction * step.alpha


def implicit(step: Step, contraction: Contraction, X: Tensor) -> Tensor:
    """(I + V γα Vᵀ)⁻¹ X for X (R, n): X itself where γ = 0, the literal form."""
    strength = damping(step, contraction)
    if not isinstance(strength, Tensor) and strength == 0:
        return X
    V = curvature_rows(step)
    if step.orthogonal and not isinstance(strength, Tensor):
        return X / (1 + strength * squares(step))[:, None]
    M = (V * strength) @ V.T
    M.diagonal().add_(1)
    out: Tensor = torch.cholesky_solve(X, torch.linalg.cholesky(M))
    return out


def squares(step: Step) -> Tensor:
    """‖v‖² of each curvature row, (R,)."""
    norms: Tensor = torch.linalg.vector_norm(curvature_rows(step), dim=1)
    return norms.square()


def expands(step: Step) -> bool:
    """Whether `growth` exceeds 1; the trace, an upper bound, decides most steps."""
    trace = (curvature_rows(step).square() * share_of_limit(step)).sum()
    return bool(trace > 1) and growth(step) > 1


def growth(step: Step) -> float:
    """Largest eigenvalue of V diag(c η P / limit) Vᵀ; above 1 a literal step, taken again and again, expands.

    Exact for any parameter groups; with J = c(I − ρĝĝᵀ) taken as c and the decays left out, an upper estimate.
    """
    weight = share_of_limit(step)
    if step.orthogonal and not isinstance(weight, Tensor):
        return float(weight * squares(step).max()) if step.V is not None and len(step.V) else 0.0
    return _largest_eigenvalue(curvature_rows(step), weight)


def share_of_limit(step: Step) -> float | Tensor:
    """c η P over the stable limit: times the curvature, how near a step is to expanding."""
    return step.clip * step.coefficients.pace / _stable_limit(step.coefficients)


def _largest_eigenvalue(V: Tensor, weight: float | Tensor) -> float:
    """Of V diag(weight) Vᵀ; by power iteration where there are many rows (to about a percent, from below)."""
    if not len(V):
        return 0.0
    if len(V) <= DIRECT_ROWS:
        return float(torch.linalg.eigvalsh((V * weight) @ V.T)[-1])
    x = torch.randn(len(V), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(V)
    size = x.norm()
    for _ in range(40):
        x = V @ (weight * (V.T @ (x / size.clamp_min(1e-30))))
        size = x.norm()
    return float(size)


def _stable_limit(k: Coefficients) -> float | Tensor:
    """Curvature × rate at which θ begins to swing with growing amplitude (an eigenvalue of the step passes −1).

    Heavy ball: 2(1+μ)/(1−τ); Nesterov: 2(1+μ)/(1+2μ); plain: 2.
    """
    return 2 * (1 + k.momentum) / (k.a * (1 - k.tau) + k.n * (1 + k.momentum))


def _clip(step: Step, rows: Tensor, dots: Tensor | None) -> Tensor:
    assert dots is not None, "a clipped step needs ⟨g, ∇L⟩ of its rows"
    return step.clip * (rows - torch.outer(dots, taken_out(step)))


def taken_out(step: Step) -> Tensor:
    """ρ s n/‖n‖² (p,): how much of each direction a unit of ⟨g, ∇L⟩ takes out of a row, where the step was clipped."""
    assert step.dot_g is not None
    n = step.w @ step.G  # the whole gradient in the kept coordinates, or one block's part of it
    rho = step.norm / (step.norm + CLIP_EPS)
    square = step.w @ step.dot_g  # ‖n‖² over all kept coordinates
    return n * torch.where(square > 0, rho * step.share / torch.where(square > 0, square, 1.0), 0.0)
