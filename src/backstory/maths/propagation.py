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

Steps whose coefficients are numbers (one for all coordinates) are taken several at once. Every matrix of the recursion is then
m₁ A + m₂ C + Σ_j m_j F_jᵀ W_j of the pair (A, C) at the end of the chunk, with F_j = JV_j S_jᵀ and W = (I + V γα Vᵀ)⁻¹ V of step j, so
the recursion runs on its few numbers m alone. Its matrix work is, for the rows X of all steps (JV, and JG where they differ),

    F = s₁ X Aᵀ + s₂ X Cᵀ + (s_j X W_jᵀ)⊳ F        one triangular solve; ⊳ keeps products with a *later* step's rows
    A ← m₁ A + m₂ C + Σ_j m_j F_jᵀ W_j             one large product each, for A and for C

Steps that share orthogonal curvature rows V (`sketch`) leave all of it in X, (p, R): with A₀, C₀ at the end of the chunk,

    A = a₁ A₀ + a₂ C₀ + X V,     S Jᵀ-rows of V = (s₁ A₀ Vᵀ + s₂ C₀ Vᵀ + X diag ‖v‖²) − (S n) dᵀ,     W = V/(1 + γα ‖v‖²)

so that no product with a (p, p) matrix is left but those of the gradient rows, once a chunk.

A segment from a to b (Algorithm 2) is the same recursion begun at b. Without momentum its K is A. With momentum the state is
(θ, m), and the recursion begins with A = [I; 0], C = [0; I]: embeddings are pairs [e^θ; e^m], and Σ = [A C] carries what is
before a to b (`carried`, `pulled`).

Assumes: the optimizer's own state is frozen at what it was in the run; coefficients scale columns (see steps).
Shapes:  B rows, R curvature rows, p kept coordinates. Rows are samples, so equations appear transposed.
Knows nothing of models, files or devices.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .steps import (
    Coefficients,
    Gamma,
    Step,
    clipped_curvature,
    clipped_gradients,
    curvature_rows,
    implicit,
    share_of_limit,
    squares,
    taken_out,
)

ALGORITHM = 1  # raise it whenever embeddings of the same rows change: stored ones of another number are not used
CHUNK_ROWS = 192  # rows of uniform steps taken at once; measured best between 160 and 256 at p = 1,024


class Propagator:
    """The pair (A, C) carried backward from the end of a run or a segment; holds one or two (p, p) matrices."""

    def __init__(self, p: int, *, dtype: torch.dtype, gamma: Gamma = None, device: str = "cpu") -> None:
        self.A = torch.eye(p, dtype=dtype, device=device)
        self.C: Tensor | None = None  # None stands for 0
        self.gamma = gamma
        self._begins = True  # A is the identity still, and products with it are spared

    @classmethod
    def of_segment(cls, p: int, *, dtype: torch.dtype, gamma: Gamma = None, momentum: bool) -> "Propagator":
        """Begun at the end of a segment: with momentum it holds two (2p, p) matrices, and embeddings have 2p numbers."""
        made = cls(p, dtype=dtype, gamma=gamma)
        if momentum:
            zero, one = torch.zeros(p, p, dtype=dtype), torch.eye(p, dtype=dtype)
            made.A, made.C = torch.cat([one, zero]), torch.cat([zero, one])
            made._begins = False
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
            out = self._way(group)(group) + out
            self._begins = False
        return out

    def _way(self, group: Sequence[Step]) -> Callable[[Sequence[Step]], list[Tensor]]:
        if not is_uniform(group[0].coefficients):
            return self._single
        if group[0].orthogonal:
            return self._shared
        return self._single if len(group) == 1 and self.C is not None else self._chunk

    def _single(self, steps: Sequence[Step]) -> list[Tensor]:
        (step,) = steps
        k, A = step.coefficients, self.A
        U = _total_effect_of_momentum(A, self.C, k)  # (p, p), reuses C
        F = _times_S(clipped_curvature(step), U, A, k)  # (R, p) rows S J √κ h
        shared = step.V is None
        E = -step.w.sqrt()[:, None] * F if shared else -step.w[:, None] * _times_S(clipped_gradients(step), U, A, k)
        _scale_columns(A, 1 - k.rate * k.decay - k.l2 * k.pace * k.n)
        if _nonzero(k.l2):
            A += U * (k.l2 * (1 - k.tau))
        A.addmm_(F.T, _whitened_rows(step, self.gamma))
        self.C = _scale_columns(U, k.momentum) if _nonzero(k.momentum) else None
        return [E]

    def _chunk(self, steps: Sequence[Step]) -> list[Tensor]:
        effects, a, c = _numbers([s.coefficients for s in steps])
        V, sizes = _rows_of_all(steps)
        of_V = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes))  # the step of each row
        W = self._whitened(steps, V, sizes, of_V)
        JV = V if all(s.clip >= 1 for s in steps) else torch.cat([clipped_curvature(s) for s in steps])
        F = self._seen(JV, effects, of_V)
        F = torch.linalg.solve_triangular(-_later(JV @ W.T, effects, of_V, of_V), F, upper=True, unitriangular=True)
        E = self._embedded(steps, F.split(sizes), F, W, effects, of_V)
        self._move(a, c, F, W, of_V)
        return E

    def _shared(self, steps: Sequence[Step]) -> list[Tensor]:
        effects, a, c = _pairs([s.coefficients for s in steps])
        V = curvature_rows(steps[0])
        rows = [torch.cat([clipped_gradients(s), taken_out(s)[None] if s.clip < 1 else s.G[:0]]) for s in steps]
        met = torch.cat(rows) @ V.T  # of the gradient rows, and of what clipping takes out
        seen = [x.split([len(r) for r in rows]) for x in (met, *self._both(torch.cat(rows)))]
        basis = [x.T for x in self._both(V)]  # A₀ Vᵀ, C₀ Vᵀ: (p, R)
        X, Y, E = torch.zeros_like(basis[0]), torch.zeros_like(basis[0]), []
        for i in reversed(range(len(steps))):
            step, s, k = steps[i], effects[i].tolist(), steps[i].coefficients
            U = Y - X * (k.pace * k.a)
            Z = U * (1 - k.tau) - X * (k.pace * k.n)  # S = s₁ A₀ + s₂ C₀ + Z V
            moved = sum(f * x[i] for f, x in zip(s, seen[1:], strict=False)) + seen[0][i] @ Z.T  # rows Sᵀ
            SV = sum(f * x for f, x in zip(s, basis, strict=False)) + Z * squares(step)
            if step.clip < 1:
                assert step.dot_v is not None
                SV = step.clip * (SV - torch.outer(moved[-1], step.dot_v))
            E.append(moved[: len(step.w)] * -step.w[:, None])
            X = X * (1 - k.rate * k.decay) + Z * k.l2 + implicit(step, self.gamma, SV.T).T
            Y = U * k.momentum
        self._take(a, c, X, Y, V)
        return E[::-1]

    def _both(self, rows: Tensor) -> list[Tensor]:
        """rows Aᵀ, and rows Cᵀ where there is a C."""
        return [rows @ x.T for x in (self.A, self.C) if x is not None]

    def _take(self, a: Tensor, c: Tensor, X: Tensor, Y: Tensor, V: Tensor) -> None:
        """(A, C) before the chunk: their numbers, and X V and Y V."""
        before = self.A * float(c[0]) if bool(c.any()) or bool(Y.any()) else None
        if before is not None and self.C is not None:
            before.add_(self.C, alpha=float(c[1]))
        self.A.mul_(float(a[0]))
        if self.C is not None:
            self.A.add_(self.C, alpha=float(a[1]))
        self.A.addmm_(X, V)
        self.C = None if before is None else before.addmm_(Y, V)

    def _embedded(
        self, steps: Sequence[Step], own: Sequence[Tensor], F: Tensor, W: Tensor, effects: Tensor, of_V: Tensor
    ) -> list[Tensor]:
        """−w S J g of the steps of a chunk: from a step's `own` rows of F where these are the gradients'."""
        if all(step.V is None for step in steps):
            return list((F * -torch.cat([s.w for s in steps]).sqrt_()[:, None]).split([len(s.w) for s in steps]))
        out = []
        for i, step in enumerate(steps):
            if step.V is None:
                out.append(own[i] * -step.w.sqrt()[:, None])
                continue
            g, of_g = clipped_gradients(step), torch.full((len(step.G),), i)
            moved = self._seen(g, effects, of_g) + _later(g @ W.T, effects, of_g, of_V) @ F
            out.append(moved * -step.w[:, None])
        return out

    def _seen(self, rows: Tensor, effects: Tensor, steps: Tensor) -> Tensor:
        """s₁ X Aᵀ + s₂ X Cᵀ, each row with the numbers of its own step."""
        s = effects[steps, :2].to(rows)
        seen = rows if self._begins else (self.A @ rows.T).T  # in this order it and the triangular solve are faster
        out = seen * s[:, :1]
        return out if self.C is None else out.addmm_(rows * s[:, 1:], self.C.T)

    def _move(self, a: Tensor, c: Tensor, F: Tensor, W: Tensor, steps: Tensor) -> None:
        """(A, C) before the chunk from their numbers."""
        A, C, each = self.A, self.C, 2 + steps
        moves = bool(c.any())
        before = A * float(c[0]) if moves else None
        if before is not None and C is not None:
            before.add_(C, alpha=float(c[1]))
        _scale_columns(A, float(a[0]))
        if C is not None:
            A.add_(C, alpha=float(a[1]))
        A.addmm_(_rows_times(F, a[each]).T, W)
        self.C = None if before is None else before.addmm_(_rows_times(F, c[each]).T, W)

    def _whitened(self, steps: Sequence[Step], V: Tensor, sizes: Sequence[int], of_V: Tensor) -> Tensor:
        """W = (I + V γα Vᵀ)⁻¹ V of every step, (R, p)."""
        if self.gamma == 0 or (self.gamma == "expanding" and not _may_expand(steps, V, of_V)):
            return V
        filled = [s._replace(V=v) for s, v in zip(steps, V.split(list(sizes)), strict=True)]
        return torch.cat([_whitened_rows(s, self.gamma) for s in filled])


def _rows_of_all(steps: Sequence[Step]) -> tuple[Tensor, list[int]]:
    """Curvature rows of consecutive steps, (R, p), and how many each has."""
    if any(s.V is not None for s in steps):
        rows = [curvature_rows(s) for s in steps]
        return torch.cat(rows), [len(x) for x in rows]
    roots = torch.cat([s.w for s in steps]).sqrt_()
    return torch.cat([s.G for s in steps]).mul_(roots[:, None]), [len(s.w) for s in steps]


def _may_expand(steps: Sequence[Step], V: Tensor, of_V: Tensor) -> bool:
    """Whether the trace, an upper bound of the growth, exceeds 1 in any of these uniform steps; one pass over the rows."""
    shares = torch.tensor([float(share_of_limit(s)) for s in steps], dtype=torch.float64)
    sizes = torch.linalg.vector_norm(V, dim=1).double().square_().cpu()
    traces = torch.zeros_like(shares).index_add_(0, of_V, sizes) * shares
    return not bool(traces.max() <= 1)  # a NaN counts as expanding


def _whitened_rows(step: Step, gamma: Gamma) -> Tensor:
    return implicit(step, gamma, curvature_rows(step))


def is_uniform(k: Coefficients) -> bool:
    """Whether the step has one number for all coordinates in everything, so that it can be taken together with others."""
    return not any(isinstance(x, Tensor) for x in k)


def _numbers(steps: Sequence[Coefficients]) -> tuple[Tensor, Tensor, Tensor]:
    """The recursion on its numbers m: S of each step (n, 2 + n), and A and C before the first one (2 + n,), in float64."""
    n = len(steps)
    a, c = np.eye(2 + n)[:2]
    effects = np.zeros((n, 2 + n))
    for i in reversed(range(n)):
        k = steps[i]
        u = c - a * (k.pace * k.a)
        effects[i] = s = u * (1 - k.tau) - a * (k.pace * k.n)
        a = a * (1 - k.rate * k.decay) + s * k.l2
        a[2 + i] += 1
        c = u * k.momentum
    return torch.from_numpy(effects), torch.from_numpy(a), torch.from_numpy(c)


def _pairs(steps: Sequence[Coefficients]) -> tuple[Tensor, Tensor, Tensor]:
    """The parts of `_numbers` that belong to (A₀, C₀): S of each step (n, 2), and A and C before the first one (2,)."""
    effects, a, c = _numbers(steps)
    return effects[:, :2], a[:2], c[:2]


def _later(products: Tensor, effects: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Products X Wᵀ of rows and columns of these steps, times s_j of the row's step: 0 unless j is later."""
    each = effects.to(products.dtype).index_select(1, 2 + columns).index_select(0, rows)
    return products * each.to(products.device)


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
    """Consecutive steps that can be taken at once: uniform ones up to CHUNK_ROWS rows, others alone."""
    groups: list[list[Step]] = []
    rows = 0
    for step in reversed(steps):
        size = len(step.w) + (0 if step.V is None or step.orthogonal else len(step.V))
        fits = groups and is_uniform(step.coefficients) and is_uniform(groups[0][0].coefficients)
        alike = (
            groups
            and step.orthogonal == groups[0][0].orthogonal
            and not (step.orthogonal and step.V is not groups[0][0].V)
        )
        if fits and alike and (step.orthogonal or rows + size <= CHUNK_ROWS):
            groups[0].insert(0, step)
        else:
            groups.insert(0, [step])
            rows = 0
        rows += size
    return groups


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


def _rows_times(F: Tensor, numbers: Tensor) -> Tensor:
    return F if bool((numbers == 1).all()) else F * numbers.to(F)[:, None]


def _nonzero(x: float | Tensor) -> bool:
    return bool((x != 0).any()) if isinstance(x, Tensor) else x != 0
