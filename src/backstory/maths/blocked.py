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

Steps whose coefficients are numbers (one for all coordinates) are taken several at once, and their own matrix products put off
(`pending`). With F_j = JV_j S_jᵀ and W = (I + V γα Vᵀ)⁻¹ V of step j, the matrix work is, for the rows X of all steps (JV, and JG
where they differ),

    F = s₁ X A₀ᵀ + s₂ X C₀ᵀ + (s_j X W_jᵀ)⊳ F      one triangular solve; ⊳ keeps products with a *later* step's rows
    A = a₁ A₀ + a₂ C₀ + Σ_j a_j F_jᵀ W_j            one large product each, for A and for C, once they are needed

At the beginning A₀ = I and C₀ = 0 cost nothing, so there rows stay pending as long as they are fewer numbers than a matrix: a run
of uniform steps and fewer rows than p/2 never makes one. A step of many rows, with momentum, is taken by itself once there are
matrices: half the products, for a pass over them.

Steps that share orthogonal curvature rows V (`sketch`) are taken by `window`: no product with a (p, p) matrix is left but those of
the gradient rows, once a chunk.

A segment from a to b (Algorithm 2) is the same recursion begun at b. Without momentum its K is A. With momentum the state is
(θ, m), and the recursion begins with A = [I; 0], C = [0; I]: embeddings are pairs [e^θ; e^m], and Σ = [A C] carries what is
before a to b (`carried`, `pulled`).

Assumes: the optimizer's own state is frozen at what it was in the run; coefficients scale columns (see steps).
Shapes:  B rows, R curvature rows, p kept coordinates. Rows are samples, so equations appear transposed.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .chunks import chunk_rows, groups, is_large, is_uniform, size
from .low_rank import FIRST, Pending, Rows
from .shared_curvature import columns
from .steps import (
    Coefficients,
    Contraction,
    Step,
    clipped_curvature,
    clipped_gradients,
    curvature_rows,
    implicit,
    share_of_limit,
    taken_out,
)

ALGORITHM = 1  # raise it whenever embeddings of the same rows change: stored ones of another number are not used
SOLVED_ROWS = 128  # rows of one triangular solve


class Propagator:
    """The pair (A, C) carried backward from the end of a run or a segment; holds at most two (p, p) matrices and pending rows."""

    def __init__(self, p: int, *, dtype: torch.dtype, contraction: Contraction = "always", device: str = "cpu") -> None:
        self.contraction = contraction
        self._p, self._like = p, torch.empty(0, dtype=dtype, device=device)
        self._A: Tensor | None = None  # None stands for I, of pairs for [I; 0]
        self._C: Tensor | None = None  # None stands for 0; where A is None, of pairs, for [0; I]
        self._of_pairs = False  # (θ, m) in place of θ
        self._pending = Pending()

    @classmethod
    def of_segment(
        cls, p: int, *, dtype: torch.dtype, contraction: Contraction = "always", momentum: bool
    ) -> "Propagator":
        """Begun at the end of a segment: with momentum it comes to hold two (2p, p) matrices, and embeddings have 2p numbers."""
        made = cls(p, dtype=dtype, contraction=contraction)
        made._of_pairs = momentum
        return made

    @property
    def A(self) -> Tensor:
        """∂θ_T/∂θ before the steps that were passed."""
        return self._held()[0]

    @property
    def sigma(self) -> Tensor:
        """What carries the state before the segment to its end: (p, p), or (2p, 2p) with momentum."""
        A, C = self._held()
        if len(A) == self._p:
            return A
        return torch.cat([A, torch.zeros_like(A) if C is None else C], 1)

    def embed(self, steps: Sequence[Step]) -> list[Tensor]:
        """Embeddings (B, p) of consecutive steps, given and returned in time order; moves past all of them.

        They may be views of what is pending: not to be written into.
        """
        out: list[Tensor] = []
        for group in reversed(groups(steps)):
            out = self._taken(group) + out
        return out

    def _taken(self, group: list[Step]) -> list[Tensor]:
        """Embeddings of steps that can be taken at once, in the way that costs least."""
        if not is_uniform(group[0].coefficients):
            return self._single(group[0])
        if group[0].orthogonal:
            return self._shared(group)
        if not (fits := self._fits(group)):
            self._settle()
        if is_large(group[0]) and not (fits and self._A is None):
            return self._single(group[0])
        return self._chunk(group)

    def _fits(self, group: Sequence[Step]) -> bool:
        """Whether these may be pending too: beside matrices a chunk, and before there is any as many numbers as it would have."""
        room = max(chunk_rows(self._p), self._p // 2 if self._A is None else 0)
        return max(self._pending.rows + sum(size(s) for s in group), self._pending.steps) <= room

    def _held(self) -> tuple[Tensor, Tensor | None]:
        """A and C themselves, nothing pending."""
        self._settle()
        if self._A is None:
            one = torch.eye(self._p, dtype=self._like.dtype, device=self._like.device)
            self._A = one
            if self._of_pairs:
                zero = torch.zeros_like(one)
                self._A, self._C = torch.cat([one, zero]), torch.cat([zero, one])
        return self._A, self._C

    def _settle(self) -> None:
        """Take what is pending into A and C."""
        pending, self._pending = self._pending, Pending()
        if not pending.steps:
            return
        A, C = self._held()
        a, c = pending.a, pending.c
        moves = bool(c[0]) or bool(c[FIRST:].any()) or (C is not None and bool(c[1]))
        before = A * float(c[0]) if moves else None
        if before is not None and C is not None:
            before.add_(C, alpha=float(c[1]))
        _scale_columns(A, float(a[0]))
        if C is not None:
            A.add_(C, alpha=float(a[1]))
        pending.subtract(a, A)
        self._C = None if before is None else pending.subtract(c, before)

    def _single(self, step: Step) -> list[Tensor]:
        k, (A, C) = step.coefficients, self._held()
        U = _total_effect_of_momentum(A, C, k)  # (p, p), reuses C
        F = _times_S(clipped_curvature(step), U, A, k)  # (R, p) rows S J √κ h
        shared = step.V is None
        E = -step.w.sqrt()[:, None] * F if shared else -step.w[:, None] * _times_S(clipped_gradients(step), U, A, k)
        _scale_columns(A, 1 - k.rate * k.decay - k.l2 * k.pace * k.n)
        if _nonzero(k.l2):
            A += U * (k.l2 * (1 - k.tau))
        A.addmm_(F.T, _whitened_rows(step, self.contraction))
        self._C = _scale_columns(U, k.momentum) if _nonzero(k.momentum) else None
        return [E]

    def _chunk(self, steps: Sequence[Step]) -> list[Tensor]:
        pending, first = self._pending, len(self._pending.a)
        X = torch.cat([s.G if s.V is None else s.V for s in steps])  # rows of V, those of gradients still without √w
        w = torch.cat([s.w if s.V is None else torch.ones_like(s.V[:, 0]) for s in steps])
        sizes = [len(s.w if s.V is None else s.V) for s in steps]
        of_V = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes))  # the step of each row
        literal = self._is_literal(steps, X, w, of_V)
        if plain := literal and all(s.V is None for s in steps):
            W, roots = X, w.sqrt()
        else:
            X, roots = X.mul_(w.sqrt()[:, None]), torch.ones_like(w)
            W = X if literal else self._whitened(steps, X.split(sizes))
        J = clipped_gradients if plain else clipped_curvature
        JX = X if all(s.clip >= 1 for s in steps) else torch.cat([J(s) for s in steps])
        effects = pending.pass_by([s.coefficients for s in steps])
        numbers = effects.index_select(1, first + of_V).index_select(0, of_V).to(JX)  # s_j for each pair of rows
        H = _solved(JX, W, numbers, self._seen(JX, effects[of_V]), roots)
        own = Rows(H, W, first + of_V)
        E = list(H.split(sizes)) if plain else self._embedded(steps, H.split(sizes), own, effects)
        pending.add(own)
        return E

    def _shared(self, steps: Sequence[Step]) -> list[Tensor]:
        self._settle()
        if self._of_pairs:
            self._held()
        V, effects = curvature_rows(steps[0]), self._pending.pass_by([s.coefficients for s in steps])
        rows = [torch.cat([clipped_gradients(s), taken_out(s)[None] if s.clip < 1 else s.G[:0]]) for s in steps]
        sizes, all_rows = [len(x) for x in rows], torch.cat(rows)
        of = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes))  # the step of each row
        met = all_rows @ V.T
        found = columns(steps, effects[:, :FIRST], met.split(sizes), self.contraction)
        basis = [V if x is None else V @ x.T for x in (self._A, self._C)[: 1 if self._C is None else 2]]
        moved = self._seen(all_rows, effects[of])
        for k, b in enumerate(basis):
            moved.addmm_(met * found.z[of, k], b)
        last = torch.tensor(sizes).cumsum(0)[[s.clip < 1 for s in steps]] - 1  # what clipping takes out stands last
        M = torch.linalg.solve_triangular(-found.L[last], moved[last], upper=True, unitriangular=True)
        moved.addmm_(found.L, M)
        X, Y = (sum((n[k, :, None] * b for k, b in enumerate(basis)), n[FIRST:].T @ M) for n in (found.x, found.y))
        self._pending.add_products(X, Y, V)
        return [x[: len(s.w)] * -s.w[:, None] for s, x in zip(steps, moved.split(sizes), strict=True)]

    def _embedded(self, steps: Sequence[Step], parts: Sequence[Tensor], own: Rows, effects: Tensor) -> list[Tensor]:
        """−w S J g of the steps of a chunk, its `own` H being −F: from a step's part of it where its rows are the gradients'."""
        apart = [i for i, s in enumerate(steps) if s.V is not None]
        moved = dict(zip(apart, self._moved([steps[i] for i in apart], own, effects[apart]), strict=True))
        return [moved[i] * -s.w[:, None] if i in moved else parts[i] * s.w.sqrt()[:, None] for i, s in enumerate(steps)]

    def _moved(self, steps: Sequence[Step], own: Rows, effects: Tensor) -> Sequence[Tensor]:
        """Rows S J g of steps with curvature rows of their own, `own` being those of the chunk."""
        if not steps:
            return ()
        g, sizes = torch.cat([clipped_gradients(s) for s in steps]), [len(s.G) for s in steps]
        s = effects.repeat_interleave(torch.tensor(sizes), 0)
        later = (g @ own.W.T).mul_(s.index_select(1, own.number).to(g))
        found: Sequence[Tensor] = self._seen(g, s).addmm_(later, own.H, alpha=-1).split(sizes)
        return found

    def _seen(self, rows: Tensor, effects: Tensor) -> Tensor:
        """rows Sᵀ as far as A₀, C₀ and pending rows make it, with the numbers of each row's own step."""
        s = effects[:, :FIRST].to(rows)
        if self._A is None:
            out = torch.cat([rows * x for x in s[:, : 1 + self._of_pairs, None].unbind(1)], 1)
        else:
            out = (rows @ self._A.T).mul_(s[:, :1])
        if self._C is not None:
            out.addmm_(rows * s[:, 1:], self._C.T)
        return self._pending.times(rows, effects, out)

    def _is_literal(self, steps: Sequence[Step], X: Tensor, w: Tensor, of_V: Tensor) -> bool:
        return self.contraction == "never" or (
            self.contraction == "when_expanding" and not _may_expand(steps, X, w, of_V)
        )

    def _whitened(self, steps: Sequence[Step], rows: Sequence[Tensor]) -> Tensor:
        """W = (I + V γα Vᵀ)⁻¹ V of every step, (R, p)."""
        return torch.cat([_whitened_rows(s._replace(V=v), self.contraction) for s, v in zip(steps, rows, strict=True)])


def _may_expand(steps: Sequence[Step], X: Tensor, w: Tensor, of_V: Tensor) -> bool:
    """Whether the trace, an upper bound of the growth, exceeds 1 in any of these uniform steps; one pass over the rows."""
    shares = torch.tensor([float(share_of_limit(s)) for s in steps], dtype=torch.float64)
    sizes = torch.linalg.vector_norm(X, dim=1).double().square_().mul_(w).cpu()
    traces = torch.zeros_like(shares).index_add_(0, of_V, sizes) * shares
    return not bool(traces.max() <= 1)  # a NaN counts as expanding


def _whitened_rows(step: Step, contraction: Contraction) -> Tensor:
    return implicit(step, contraction, curvature_rows(step))


def _solved(JX: Tensor, W: Tensor, numbers: Tensor, seen: Tensor, roots: Tensor) -> Tensor:
    """−√w F for V = √w X, from the last rows to the first; overwrites `seen`.

    What scales rows is done on small matrices: every pass over the rows costs.
    """
    H = torch.empty_like(seen)
    for hi in range(len(JX), 0, -SOLVED_ROWS):
        lo = max(0, hi - SOLVED_ROWS)
        later = (JX[lo:hi] @ W[lo:].T).mul_(numbers[lo:hi, lo:])
        own, r = later[:, : hi - lo], roots[lo:hi]
        small = (
            torch.linalg.solve_triangular(own * torch.outer(-r, r), torch.diag(r), upper=True, unitriangular=True)
            * -r[:, None]
        )
        torch.mm(small, seen[lo:hi].addmm_(later[:, hi - lo :], H[hi:], alpha=-1), out=H[lo:hi])
    return H


def embed(
    steps_from_last: Iterable[Step], p: int, *, dtype: torch.dtype = torch.float64, contraction: Contraction = "always"
) -> Iterator[Tensor]:
    """Yield the embeddings of each step, last step first."""
    propagator = Propagator(p, dtype=dtype, contraction=contraction)
    for step in steps_from_last:
        yield propagator.embed([step])[0]


def carried(E: Tensor, sigma: Tensor) -> Tensor:
    """Embeddings (N, n) of an earlier segment on the state at the end of the next one."""
    return E @ sigma.T


def pulled(x: Tensor, sigma: Tensor) -> Tensor:
    """Queries (Q, n) on the state at the end of a segment, as queries on the state at its beginning."""
    return x @ sigma


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
