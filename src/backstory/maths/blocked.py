r"""Embeddings of a run, fast: the recursion of `recursion.py` for every optimizer of `steps.py`, several steps at a time.

Read `recursion.py` first. It takes plain SGD step by step, e = η w K g and K ← K − Σ e gᵀ, at 4p² operations a row, in products so
thin (B rows) that reading and writing the p × p matrix takes most of the time. Four pieces of algebra follow; none of them
changes a number but by rounding.

1. *The pair (A, C)*, for momentum, decay, clipping and Adam (`_embed_step`). With A = ∂θ_T/∂θ_{t+1}, C = ∂θ_T/∂m_{t+1}, at the end
   A = I, C = 0, for t = T−1 … 0 (letters of a step in `steps.py`):

       U   = C − η a A P                      total effect of m_{t+1}
       S   = (1−τ) U − η n A P                total effect of u_t
       e_z = −w_z S J g_z                     embedding of each occurrence of step t
       A   ← (1−ηλ') A + S (J H̃ + λ I)
       C   ← μ U

       H̃ = Vᵀ (I + V γα Vᵀ)⁻¹ V = Vᵀ W       the implicit form: curvature that cannot expand (γ = 0: literal, W = V)

   Plain SGD gives the paper's K = A. The cost is that of Algorithm 1, 4p² a row (6p² for Nesterov), and some passes over A and C
   a step. S is never formed: rows are multiplied by U and A instead. Any coefficients will do, those of parameter groups
   too, which scale columns.

2. *Chunks* (`group_steps`, `_embed_chunk`, `_solve_chunk`). Where the coefficients are numbers, S of each step is a combination of
   the A₀, C₀ after the chunk and of what the later steps of the chunk left, so a chunk is linear in its unknown rows F_j = JV_j S_jᵀ.
   For the rows X of all its steps,

       F = s₁ X A₀ᵀ + s₂ X C₀ᵀ + (s_j X W_jᵀ)⊳ F      one triangular solve; ⊳ keeps products with a *later* step's rows
       A = a₁ A₀ + a₂ C₀ + Σ_j a_j F_jᵀ W_j            one large product each, for A and for C

   The operations are as many (4p² a row; 8p² with momentum, where C has products of its own) plus about 2Rp a row for a chunk of R
   rows, but they are two large products where there were two thin ones a step. Measured against Algorithm 1 as it is printed, at
   p = 1,024: 24 times as fast at 1 row a step, 7.1 at 4, 2.6 at 16 (experiments/results/benchmarks.md). R is p/4 within bounds: with more rows the
   triangle costs too much. A step of many rows with momentum goes alone (`is_large`): its products are large already, and half as many.

3. *Low-rank terms* (`low_rank.py`, `_has_room_for`, `_multiply_out`). The last line above can wait: until it is multiplied out, A is the
   numbers a₁, a₂, a_j and the rows F_j, W_j, and rows times A are 4Mp operations for M such rows where a matrix takes 2p² (`_times_S`).
   Beside matrices one chunk waits. At the end of a run A₀ = I and C₀ = 0 cost nothing, so there up to p/2 rows wait (they are then
   as many numbers as a matrix): a run of fewer never makes one. Measured jointly at p = 17,408, 1,024 samples: 0.41 s
   in place of 8.0 s, with AdamW 0.45 s in place of 21.1 s (experiments/results/benchmarks.md).

4. *Windows* (`shared_curvature.py`, `window_terms.py`, `_embed_window`). In a run with windows steps share curvature rows V, and these are
   orthogonal: V then mixes no columns, W is a division, and what a window adds to A and C is X V and Y V with a few numbers a column and step.
   Products with A and C are left for V once a window and for the gradient rows. At the end of a run, while windows have brought at most
   0.6 p rows, everything is a combination of these rows, and of p coordinates there are left products of the windows' rows with each other.
   Measured on a small GPT (p = 12,000, three windows of 512 rows, 1,024 samples): 1.2 s of CPU time where X and Y written out took 2.7.

A segment from a to b (Algorithm 2) is the same recursion begun at b. Without momentum its K is A. With momentum the state is
(θ, m), and the recursion begins with A = [I; 0], C = [0; I]: embeddings are pairs [e^θ; e^m], and Σ = [A C] carries what is
before a to b: embeddings as E Σᵀ, queries at b as x Σ.

The influence of z on a query is ⟨∇ℓ(θ_T, q), e⟩: positive means that removing z would have raised the query's loss.
Assumes: the optimizer's own state is frozen at what it was in the run; coefficients scale columns (see steps).
Shapes:  B rows, R curvature rows, p kept coordinates. Rows are samples, so equations appear transposed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .low_rank import FIRST, LowRank, Terms
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
from .window_terms import WindowTerms

ALGORITHM = 1  # raise it whenever embeddings of the same rows change: stored ones of another number are not used
SOLVED_ROWS = 128  # rows of one triangular solve


class Between(NamedTuple):
    """A number that follows p within bounds, both of them allowed."""

    least: int
    most: int

    def nearest(self, wanted: int) -> int:
        """`wanted`, or the bound that it passes."""
        return min(max(self.least, wanted), self.most)


CHUNK_ROWS = Between(256, 1024)  # rows of uniform steps taken at once: a quarter of p
WAITING = 0.6  # m rows that windows brought have m p numbers, and theirs are m²: so many times p rows make p² of both
LARGE_ROWS = Between(64, 128)  # a step of more rows, with momentum, is taken alone: a 32nd of p


class Propagator:
    """The pair (A, C) carried backward from the end of a run or a segment; at most two (p, p) matrices and low-rank terms.

    With `of_pairs` the state is (θ, m), for a segment with momentum: matrices are (2p, p), and embeddings have 2p numbers.
    """

    def __init__(
        self,
        p: int,
        *,
        dtype: torch.dtype,
        contraction: Contraction = "always",
        of_pairs: bool = False,
        device: str = "cpu",
    ) -> None:
        self.contraction = contraction
        self._p, self._like = p, torch.empty(0, dtype=dtype, device=device)
        self._A: Tensor | None = None  # None stands for I, of pairs for [I; 0]
        self._C: Tensor | None = None  # None stands for 0; where A is None, of pairs, for [0; I]
        self._of_pairs = of_pairs
        self._low_rank = LowRank()  # what is not multiplied out into A and C yet
        self._windows: WindowTerms | None = (
            None if of_pairs else WindowTerms()
        )  # until there is anything else than windows

    @property
    def sigma(self) -> Tensor:
        """What carries the state before the steps that were passed to the end: A = ∂θ_T/∂θ, of pairs (2p, 2p)."""
        A, C = self._matrices()
        if len(A) == self._p:
            return A
        return torch.cat([A, torch.zeros_like(A) if C is None else C], 1)

    def embed(self, steps: Sequence[Step]) -> list[Tensor]:
        """Embeddings (B, p) of consecutive steps, given and returned in time order; moves past all of them.

        They may be views of low-rank terms: not to be written into.
        """
        E: list[Tensor] = []
        for group in reversed(group_steps(steps)):
            E = self._embed_group(group) + E
        return E

    def _embed_group(self, group: list[Step]) -> list[Tensor]:
        """Embeddings of steps that can be taken at once, in the way that costs least."""
        if self._windows is not None:
            if self._has_room_for_window(group):
                return self._windows.embed(group, self.contraction)
            self._leave_windows()
        if not is_uniform(group[0].coefficients):
            return self._embed_step(group[0])
        if group[0].orthogonal:
            return self._embed_window(group)
        if not (room := self._has_room_for(group)):
            self._multiply_out()
        if is_large(group[0]) and not (room and self._A is None):
            return self._embed_step(group[0])
        return self._embed_chunk(group)

    def _has_room_for_window(self, group: Sequence[Step]) -> bool:
        """Whether its rows may wait beside those of later windows: as long as they and their numbers are no more than a matrix has."""
        first = group[0]
        if self._windows is None or not (first.orthogonal and is_uniform(first.coefficients)):
            return False
        rows = len(curvature_rows(first)) + sum(s.clip < 1 for s in group)
        return self._windows.rows + rows <= WAITING * self._p

    def _leave_windows(self) -> None:
        """Make the matrices, where windows have been passed."""
        windows, self._windows = self._windows, None
        if windows is not None and windows.rows:
            self._A, self._C = windows.multiplied_out()

    def _has_room_for(self, group: Sequence[Step]) -> bool:
        """Whether the rows of these steps may wait too."""
        return self._has_room(sum(size(s) for s in group))

    def _has_room(self, rows: int) -> bool:
        """Whether so many more rows may wait: beside matrices a chunk, and before there is any as many numbers as it would have."""
        room = max(chunk_rows(self._p), self._p // 2 if self._A is None else 0)
        return max(self._low_rank.rows + rows, self._low_rank.steps) <= room

    def _numbers(self) -> list[Tensor]:
        """Those of A, and of C unless it is 0."""
        a, c = self._low_rank.a, self._low_rank.c
        zero = self._C is None and not bool(c[0]) and not bool(c[FIRST:].any())
        return [a] if zero else [a, c]

    def _matrices(self) -> tuple[Tensor, Tensor | None]:
        """A and C themselves, everything multiplied out."""
        self._leave_windows()
        self._multiply_out()
        if self._A is None:
            one = torch.eye(self._p, dtype=self._like.dtype, device=self._like.device)
            self._A = one
            if self._of_pairs:
                zero = torch.zeros_like(one)
                self._A, self._C = torch.cat([one, zero]), torch.cat([zero, one])
        return self._A, self._C

    def _multiply_out(self) -> None:
        """A = a₁ A₀ + a₂ C₀ − Σ_j a_j H_jᵀ W_j, and C."""
        low_rank, self._low_rank = self._low_rank, LowRank()
        if not low_rank.steps:
            return
        A, C = self._matrices()
        a, c = low_rank.a, low_rank.c
        is_momentum = bool(c[0]) or bool(c[FIRST:].any()) or (C is not None and bool(c[1]))
        new_C = A * float(c[0]) if is_momentum else None
        if new_C is not None and C is not None:
            new_C.add_(C, alpha=float(c[1]))
        _scale_columns(A, float(a[0]))
        if C is not None:
            A.add_(C, alpha=float(a[1]))
        low_rank.subtract(a, A)
        self._C = None if new_C is None else low_rank.subtract(c, new_C)

    def _embed_step(self, step: Step) -> list[Tensor]:
        """One step by itself, on the matrices."""
        k, (A, C) = step.coefficients, self._matrices()
        effect = k.pace * k.a
        U = A * -effect if C is None else C.sub_(A * effect)  # (p, p) total effect of m, in the place of C
        F = _times_S_of(clipped_curvature(step), U, A, k)  # (R, p) rows S J √κ h
        fisher = step.V is None
        E = -step.w.sqrt()[:, None] * F if fisher else -step.w[:, None] * _times_S_of(clipped_gradients(step), U, A, k)
        _scale_columns(A, 1 - k.rate * k.decay - k.l2 * k.pace * k.n)
        if _nonzero(k.l2):
            A += U * (k.l2 * (1 - k.tau))
        A.addmm_(F.T, implicit(step, self.contraction, curvature_rows(step)))
        self._C = _scale_columns(U, k.momentum) if _nonzero(k.momentum) else None
        return [E]

    def _embed_chunk(self, steps: Sequence[Step]) -> list[Tensor]:
        """Uniform steps together: the triangular solve, whose rows become low-rank terms."""
        low_rank, first = self._low_rank, len(self._low_rank.a)
        X = torch.cat([s.G if s.V is None else s.V for s in steps])  # rows of V, those of gradients still without √w
        w = torch.cat([s.w if s.V is None else torch.ones_like(s.V[:, 0]) for s in steps])
        sizes = [len(s.w if s.V is None else s.V) for s in steps]
        of_V = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes))  # the step of each row
        literal = self.contraction == "never"
        literal |= self.contraction == "when_expanding" and not _may_expand(steps, X, w, of_V)
        if plain := literal and all(s.V is None for s in steps):
            W, roots = X, w.sqrt()
        else:
            X, roots = X.mul_(w.sqrt()[:, None]), torch.ones_like(w)
            pairs = zip(steps, X.split(sizes), strict=True)
            W = X if literal else torch.cat([implicit(s._replace(V=v), self.contraction, v) for s, v in pairs])
        J = clipped_gradients if plain else clipped_curvature
        JX = X if all(s.clip >= 1 for s in steps) else torch.cat([J(s) for s in steps])
        s = low_rank.pass_by([step.coefficients for step in steps])
        s_of_rows = s.index_select(1, first + of_V).index_select(0, of_V).to(JX)  # s_j for each pair of rows
        H = _solve_chunk(JX, W, s_of_rows, self._times_S(JX, s[of_V]), roots)
        terms = Terms(H, W, first + of_V)
        E = list(H.split(sizes)) if plain else self._embeddings(steps, H.split(sizes), terms, s)
        low_rank.add(terms)
        return E

    def _embed_window(self, steps: Sequence[Step]) -> list[Tensor]:
        """Steps that share orthogonal curvature rows: numbers for each column, and one triangular solve over the clipped steps."""
        V, coefficients = curvature_rows(steps[0]), [step.coefficients for step in steps]
        if self._of_pairs or not self._has_room(2 * len(V)):
            self._matrices()
        basis = self._times_A_and_C(V)
        s = self._low_rank.pass_by(coefficients)
        of_ends = LowRank().pass_by(coefficients)[:, :FIRST]  # the same, of A and C themselves
        rows = [torch.cat([clipped_gradients(x), taken_out(x)[None] if x.clip < 1 else x.G[:0]]) for x in steps]
        sizes, JG = [len(x) for x in rows], torch.cat(rows)
        of_G = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes))  # the step of each row
        in_V = JG @ V.T
        numbers = columns(steps, of_ends, in_V.split(sizes), self.contraction)
        GS = self._times_S(JG, s[of_G])  # (N, p)
        for k, b in enumerate(basis):
            GS.addmm_(in_V * numbers.z[of_G, k], b)
        last = torch.tensor(sizes).cumsum(0)[[x.clip < 1 for x in steps]] - 1  # what clipping takes out stands last
        M = torch.linalg.solve_triangular(-numbers.L[last], GS[last], upper=True, unitriangular=True)
        GS.addmm_(numbers.L, M)
        X, Y = (sum((n[k, :, None] * b for k, b in enumerate(basis)), n[FIRST:].T @ M) for n in (numbers.x, numbers.y))
        self._low_rank.add_products(X, Y, V)
        return [x[: len(step.w)] * -step.w[:, None] for step, x in zip(steps, GS.split(sizes), strict=True)]

    def _embeddings(self, steps: Sequence[Step], parts: Sequence[Tensor], terms: Terms, s: Tensor) -> list[Tensor]:
        """−w S J g of the steps of a chunk: from its H = −F, in `parts`, where a step's curvature rows are its gradients."""
        apart = [i for i, step in enumerate(steps) if step.V is not None]
        GS = dict(zip(apart, self._gradients_times_S([steps[i] for i in apart], terms, s[apart]), strict=True))
        return [
            GS[i] * -step.w[:, None] if i in GS else parts[i] * step.w.sqrt()[:, None] for i, step in enumerate(steps)
        ]

    def _gradients_times_S(self, steps: Sequence[Step], terms: Terms, s: Tensor) -> Sequence[Tensor]:
        """Rows S J g of steps with curvature rows of their own, `terms` being those of their chunk."""
        if not steps:
            return ()
        JG, sizes = torch.cat([clipped_gradients(step) for step in steps]), [len(step.G) for step in steps]
        s = s.repeat_interleave(torch.tensor(sizes), 0)
        later = (JG @ terms.W.T).mul_(s.index_select(1, terms.number).to(JG))
        GS: Sequence[Tensor] = self._times_S(JG, s).addmm_(later, terms.H, alpha=-1).split(sizes)
        return GS

    def _times_A_and_C(self, V: Tensor) -> list[Tensor]:
        """V Aᵀ and V Cᵀ, the latter unless C is 0."""
        numbers = self._numbers()
        out = [self._times_matrices(V, x[:FIRST].to(V).expand(len(V), -1)) for x in numbers]
        self._low_rank.times_alike(V, numbers, out)
        return out

    def _times_S(self, rows: Tensor, s: Tensor) -> Tensor:
        """rows Sᵀ as far as A₀, C₀ and earlier low-rank terms make it, with the numbers s of each row's step."""
        return self._low_rank.times(rows, s, self._times_matrices(rows, s[:, :FIRST].to(rows)))

    def _times_matrices(self, rows: Tensor, of_matrices: Tensor) -> Tensor:
        """The same as far as A₀ and C₀ make it."""
        if self._A is None:
            out = torch.cat([rows * x for x in of_matrices[:, : 1 + self._of_pairs, None].unbind(1)], 1)
        else:
            out = (rows @ self._A.T).mul_(of_matrices[:, :1])
        if self._C is not None:
            out.addmm_(rows * of_matrices[:, 1:], self._C.T)
        return out


def group_steps(steps: Sequence[Step]) -> list[list[Step]]:
    """Consecutive steps that can be taken at once: uniform ones up to a chunk's rows, others alone."""
    groups: list[list[Step]] = []
    rows = 0
    for step in reversed(steps):
        rows += size(step)
        if groups and _alike(step, groups[0][0]) and (step.orthogonal or rows <= chunk_rows(step.G.shape[1])):
            groups[0].insert(0, step)
        else:
            groups.insert(0, [step])
            rows = size(step)
    return groups


def chunk_rows(p: int) -> int:
    """How many rows are taken at once: with more of them products are larger, with fewer the triangles smaller."""
    return CHUNK_ROWS.nearest(p // 4)


def is_uniform(k: Coefficients) -> bool:
    """Whether the step has one number for all coordinates in everything, so that it can be taken together with others."""
    return not any(isinstance(x, Tensor) for x in k)


def is_large(step: Step) -> bool:
    """Whether a uniform step is better taken alone: with momentum chunks need twice the products, steps a pass over the matrices."""
    p = step.G.shape[1]
    return size(step) > (LARGE_ROWS.nearest(p // 32) if step.coefficients.momentum else chunk_rows(p))


def size(step: Step) -> int:
    """Rows that a step brings to its chunk."""
    return len(step.w) + (0 if step.V is None or step.orthogonal else len(step.V))


def _alike(step: Step, other: Step) -> bool:
    if not (is_uniform(step.coefficients) and is_uniform(other.coefficients)):
        return False
    if step.orthogonal or other.orthogonal:
        return step.orthogonal == other.orthogonal and step.V is other.V
    return not (is_large(step) or is_large(other))


def _may_expand(steps: Sequence[Step], X: Tensor, w: Tensor, of_V: Tensor) -> bool:
    """Whether the trace, an upper bound of the growth, exceeds 1 in any of these uniform steps; one pass over the rows."""
    shares = torch.tensor([float(share_of_limit(s)) for s in steps], dtype=torch.float64)
    sizes = torch.linalg.vector_norm(X, dim=1).double().square_().mul_(w).cpu()
    traces = torch.zeros_like(shares).index_add_(0, of_V, sizes) * shares
    return not bool(traces.max() <= 1)  # a NaN counts as expanding


def _solve_chunk(JX: Tensor, W: Tensor, s: Tensor, right: Tensor, roots: Tensor) -> Tensor:
    """H = −√w F for V = √w X, from the last rows to the first, some at a time; overwrites the `right` side of the equation.

    What scales rows is done on small matrices: every pass over the rows costs.
    """
    H = torch.empty_like(right)
    for hi in range(len(JX), 0, -SOLVED_ROWS):
        lo = max(0, hi - SOLVED_ROWS)
        later = (JX[lo:hi] @ W[lo:].T).mul_(s[lo:hi, lo:])
        triangle, r = later[:, : hi - lo], roots[lo:hi]
        inverse = (
            torch.linalg.solve_triangular(triangle * torch.outer(-r, r), torch.diag(r), upper=True, unitriangular=True)
            * -r[:, None]
        )
        torch.mm(inverse, right[lo:hi].addmm_(later[:, hi - lo :], H[hi:], alpha=-1), out=H[lo:hi])
    return H


def _times_S_of(rows: Tensor, U: Tensor, A: Tensor, k: Coefficients) -> Tensor:
    """rows Sᵀ for S = (1−τ) U − η n A P, without forming S."""
    out = (rows * (1 - k.tau)) @ U.T
    return out - (rows * (k.pace * k.n)) @ A.T if _nonzero(k.n) else out


def _scale_columns(M: Tensor, factor: float | Tensor) -> Tensor:
    return M if not isinstance(factor, Tensor) and factor == 1 else M.mul_(factor)


def _nonzero(x: float | Tensor) -> bool:
    return bool((x != 0).any()) if isinstance(x, Tensor) else x != 0
