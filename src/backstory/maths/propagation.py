r"""Backward recursion: from recorded rows to data value embeddings (Algorithm 1, and beyond plain SGD).

With A = ∂θ_T/∂θ_{t+1}, C = ∂θ_T/∂m_{t+1}, at the end A = I, C = 0, for t = T−1 … 0:

    U   = C − η a A P                      total effect of m_{t+1}
    S   = (1−τ) U − η n A P                total effect of u_t
    e_z = −w_z S J g_z                     embedding of each occurrence of step t
    A   ← (1−ηλ') A + S (J H̃ + λ I)
    C   ← μ U

    H̃ = Vᵀ (I + V γα Vᵀ)⁻¹ V              the implicit form: curvature that cannot expand (γ = 0: literal)

Plain SGD gives the paper: e = η w K g, K ← K − Σ η w K g gᵀ, its K being I − M. The influence of z on a query
is ⟨∇ℓ(θ_T, q), e⟩: positive means that removing z would have raised the query's loss.

Plain SGD steps are taken several at once. For rows in time order, V whitened per step (L⁻¹V), and ⊳ keeping
only products with a curvature row of a *later* step:

    (I + diag(η) (JV Vᵀ)⊳) F = diag(η) JV Kᵀ         one triangular solve
    E = diag(η w) (JG Kᵀ − (JG Vᵀ)⊳ F)
    K ← K − Fᵀ V                                      one large product

A segment from a to b (Algorithm 2) is the same recursion begun at b. Without momentum its K is A. With momentum the state is
(θ, m), and the recursion begins with A = [I; 0], C = [0; I]: embeddings are pairs [e^θ; e^m], and Σ = [A C] carries what is
before a to b (`carried`, `pulled`).

Assumes: the optimizer's own state is frozen at what it was in the run; coefficients scale columns (see steps).
Shapes:  B rows, R curvature rows, p kept coordinates. Rows are samples, so equations appear transposed.
Knows nothing of models, files or devices.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .steps import (
    Coefficients,
    Gamma,
    Step,
    clipped_curvature,
    clipped_gradients,
    curvature_rows,
    damping,
    whitening,
)

ALGORITHM = 1  # raise it whenever embeddings of the same rows change: stored ones of another number are not used
CHUNK_ROWS = 128  # rows taken at once for plain SGD; measured best between 96 and 256 at p = 1,024


class Propagator:
    """The pair (A, C) carried backward from the end of a run or a segment; holds one or two (p, p) matrices."""

    def __init__(self, p: int, *, dtype: torch.dtype, gamma: Gamma = None, device: str = "cpu") -> None:
        self.A = torch.eye(p, dtype=dtype, device=device)
        self.C: Tensor | None = None  # None stands for 0
        self.gamma = gamma

    @classmethod
    def of_segment(cls, p: int, *, dtype: torch.dtype, gamma: Gamma = None, momentum: bool) -> "Propagator":
        """Begun at the end of a segment: with momentum it holds two (2p, p) matrices, and embeddings have 2p numbers."""
        made = cls(p, dtype=dtype, gamma=gamma)
        if momentum:
            zero, one = torch.zeros(p, p, dtype=dtype), torch.eye(p, dtype=dtype)
            made.A, made.C = torch.cat([one, zero]), torch.cat([zero, one])
        return made

    @property
    def sigma(self) -> Tensor:
        """What carries the state before the segment to its end: (p, p), or (2p, 2p) with momentum."""
        n, p = self.A.shape
        if n == p:
            return self.A
        return torch.cat([self.A, torch.zeros_like(self.A) if self.C is None else self.C], 1)

    def embed(self, steps: Sequence[Step]) -> list[Tensor]:
        """Embeddings (B, p) of consecutive steps, given and returned in time order; moves past all of them."""
        out: list[Tensor] = []
        for group in reversed(_groups(steps)):
            if self.C is not None or not _can_be_chunked(group[-1]):  # after a plain step taken alone, C is 0
                out = [self._single(group.pop()), *out]
            if group:
                out = self._chunk(group) + out
        return out

    def _single(self, step: Step) -> Tensor:
        k, A = step.coefficients, self.A
        U = _total_effect_of_momentum(A, self.C, k)  # (p, p), reuses C
        shared = step.V is None
        V, JV = curvature_rows(step), clipped_curvature(step)
        F = _times_S(JV, U, A, k)  # (R, p) rows S J √κ h
        E = -step.w.sqrt()[:, None] * F if shared else -step.w[:, None] * _times_S(clipped_gradients(step), U, A, k)
        L = whitening(V, damping(step, self.gamma))
        WV = V if L is None else torch.cholesky_solve(V, L)
        _scale_columns(A, 1 - k.rate * k.decay - k.l2 * k.pace * k.n)
        if _nonzero(k.l2):
            A += U * (k.l2 * (1 - k.tau))
        A.addmm_(F.T, WV)
        self.C = _scale_columns(U, k.momentum) if _nonzero(k.momentum) else None
        return E

    def _chunk(self, steps: Sequence[Step]) -> list[Tensor]:
        sizes = [len(s.w) for s in steps]
        which = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes)).to(self.A.device)
        later = which[:, None] < which[None, :]  # [i, j]: row j belongs to a later step than row i
        V, JV, mix = _whitened_rows(steps, self.gamma)  # (N, p), (N, p), (N, N) block diagonal or None
        rate = torch.cat([s.w.new_full(s.w.shape, float(s.coefficients.rate)) for s in steps])
        X = JV @ self.A.T  # (N, p)
        system = torch.where(later, JV @ V.T, 0.0)
        left = rate[:, None] * system
        left.diagonal().fill_(1.0)
        F = torch.linalg.solve_triangular(left, rate[:, None] * X, upper=True, unitriangular=True)
        self.A.addmm_(F.T, V, alpha=-1)
        if mix is None:  # the literal form: √w (JG) = JV, so E is F up to a factor
            E = torch.cat([s.w for s in steps]).sqrt()[:, None] * F
        else:
            raw = mix @ (X - system @ F)  # rows √w J g (I − …)Kᵀ
            E = (rate * torch.cat([s.w for s in steps]).sqrt())[:, None] * raw
        return list(E.split(sizes))


def is_plain(k: Coefficients) -> bool:
    """SGD without momentum or decay, one rate for all coordinates: the paper's case, which can be chunked."""
    scalars = not any(isinstance(x, Tensor) for x in k)
    return scalars and k[1:] == (0, 0, 0, 0, 1, 0, 1)  # l2, decay, momentum, tau, a, n, P


def _can_be_chunked(step: Step) -> bool:
    return is_plain(step.coefficients) and step.V is None


def embed(
    steps_from_last: Iterable[Step], p: int, *, dtype: torch.dtype = torch.float64, gamma: Gamma = None
) -> Iterator[Tensor]:
    """Yield the embeddings of each step, last step first."""
    propagator = Propagator(p, dtype=dtype, gamma=gamma)
    for step in steps_from_last:
        yield propagator.embed([step])[0]


def carried(E: Tensor, sigma: Tensor) -> Tensor:
    """Embeddings (N, n) of an earlier segment on the state at the end of the next one."""
    return E @ sigma.T


def pulled(x: Tensor, sigma: Tensor) -> Tensor:
    """Queries (Q, n) on the state at the end of a segment, as queries on the state at its beginning."""
    return x @ sigma


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Consecutive steps that can be taken at once: plain ones up to CHUNK_ROWS rows, others alone."""
    groups: list[list[Step]] = []
    rows = 0
    for step in reversed(steps):
        fits = groups and _can_be_chunked(step) and _can_be_chunked(groups[0][0])
        if fits and rows + len(step.w) <= CHUNK_ROWS:
            groups[0].insert(0, step)
        else:
            groups.insert(0, [step])
            rows = 0
        rows += len(step.w)
    return groups


def _whitened_rows(steps: Sequence[Step], gamma: Gamma) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows V and JV of all steps with each step's L⁻¹ applied, and the block diagonal of the L's."""
    Vs, JVs, Ls = [], [], []
    for step in steps:
        V, JV = curvature_rows(step), clipped_curvature(step)
        L = whitening(V, damping(step, gamma))
        if L is not None:
            JV = V = torch.linalg.solve_triangular(L, V, upper=False)
            if step.clip < 1:
                JV = torch.linalg.solve_triangular(L, clipped_curvature(step), upper=False)
        Ls.append(L)
        Vs.append(V)
        JVs.append(JV)
    if all(L is None for L in Ls):
        return torch.cat(Vs), torch.cat(JVs), None
    whole = [torch.eye(len(V), dtype=V.dtype, device=V.device) if L is None else L for L, V in zip(Ls, Vs, strict=True)]
    return torch.cat(Vs), torch.cat(JVs), torch.block_diag(*whole)


def _total_effect_of_momentum(A: Tensor, C: Tensor | None, k: Coefficients) -> Tensor:
    """U = C − η a A P; overwrites C."""
    effect = k.pace * k.a
    return A * -effect if C is None else C.sub_(A * effect)


def _times_S(rows: Tensor, U: Tensor, A: Tensor, k: Coefficients) -> Tensor:
    """rows Sᵀ for S = (1−τ) U − η n A P, without forming S."""
    out = (rows * (1 - k.tau)) @ U.T
    return out - (rows * (k.pace * k.n)) @ A.T if _nonzero(k.n) else out


def _scale_columns(M: Tensor, factor: float | Tensor) -> Tensor:
    return M if not isinstance(factor, Tensor) and factor == 1 else M.mul_(factor)


def _nonzero(x: float | Tensor) -> bool:
    return bool((x != 0).any()) if isinstance(x, Tensor) else x != 0
