r"""Windows at the end of a run: A and C as combinations of the few rows that span them (fourth part of `blocked`).

Until a matrix is made, A₀ = I and C₀ = 0, and whatever windows leave lies in the span of the rows that they brought: D, the rows V of each
window passed and what clipping takes out of its steps (n, see `steps`), one below the other. So numbers stand for rows,

    A = a₁ I + Σ_j (a_{xj} X_j + a_{yj} Y_j)ᵀ V_j,      X_j = x_j D,  Y_j = y_j D         C the same with c, S of a step with s

and the recursion of `shared_curvature` runs on them: of p coordinates there is left one product of each window's rows with those of the
later windows, and one of the numbers of all embeddings with D.

Shapes:  p coordinates, m rows of D, R rows of V, N gradient rows of a window's steps and one for each clipped step.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .low_rank import FIRST, LowRank
from .shared_curvature import columns
from .steps import Contraction, Step, clipped_gradients, curvature_rows, taken_out


class WindowTerms:
    """A and C since the end of a run, as long as only windows were passed."""

    def __init__(self) -> None:
        self._a, self._c = torch.eye(FIRST, dtype=torch.float64)
        self._c[1] = 0  # there is no C₀
        self._D: list[Tensor] = []
        self._windows: list[
            tuple[Tensor, Tensor, Tensor | None]
        ] = []  # V, and the numbers x and y of X and Y; None is 0

    @property
    def rows(self) -> int:
        """How many rows D has."""
        return sum(map(len, self._D))

    def multiplied_out(self) -> tuple[Tensor, Tensor | None]:
        """A and C themselves, the latter None where it is 0; what they are made of is let go on the way."""
        like = self._D[0]
        one = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
        is_momentum = bool(self._c.any())
        A, C = one * float(self._a[0]), one.mul_(float(self._c[0])) if is_momentum else None
        while self._windows:
            V, *numbers = self._windows.pop()
            at = FIRST + 2 * len(self._windows)
            for k, x in enumerate(numbers):
                if x is None:
                    continue
                X = self._times_D(x, x.new_zeros(len(x), V.shape[1]))
                A.addmm_(X.T, V, alpha=float(self._a[at + k]))
                if C is not None:
                    C.addmm_(X.T, V, alpha=float(self._c[at + k]))
        return A, C

    def embed(self, steps: Sequence[Step], contraction: Contraction) -> list[Tensor]:
        """Embeddings of the steps of one window; moves past them."""
        V, clipped = curvature_rows(steps[0]), [x.clip < 1 for x in steps]
        rows = [torch.cat([clipped_gradients(x), taken_out(x)[None] if x.clip < 1 else x.G[:0]]) for x in steps]
        sizes, JG = [len(x) for x in rows], torch.cat(rows)
        last = torch.tensor(sizes).cumsum(0)[clipped] - 1  # what clipping takes out stands last
        of_G = torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(sizes))  # the step of each row
        basis, s, ends = self._times_A_and_C(V), *self._pass_by(steps)
        in_V, s_of_G = JG @ V.T, s.to(JG)[of_G]
        numbers = columns(steps, ends, in_V.split(sizes), contraction)
        GS = self._times_S(JG, s_of_G)  # (N, m), beside s₁ JG
        GS = F.pad(GS, (0, len(V) + len(last)))
        for k, b in enumerate(basis):
            GS[:, : b.shape[1]] += (in_V * numbers.z[of_G, k]) @ b
        GS[last, GS.shape[1] - len(last) + torch.arange(len(last))] += s_of_G[last, 0]  # s₁ n itself
        M = torch.linalg.solve_triangular(-numbers.L[last], GS[last], upper=True, unitriangular=True)
        GS.addmm_(numbers.L, M)
        self._add(V, JG[last], [_combined(n, basis, M) for n in (numbers.x, numbers.y)])
        weight = torch.cat([F.pad(-x.w, (0, int(c))) for x, c in zip(steps, clipped, strict=True)])
        E = self._times_D(GS * weight[:, None], JG * (s_of_G[:, 0] * weight)[:, None])
        return [x[: len(step.w)] for step, x in zip(steps, E.split(sizes), strict=True)]

    def _add(self, V: Tensor, taken: Tensor, numbers: Sequence[Tensor]) -> None:
        self._D += [V, taken] if len(taken) else [V]
        x, y = numbers
        self._windows.append((V, x, y if bool(y.any()) else None))
        self._a = torch.cat([self._a, self._a.new_tensor([1, 0])])
        self._c = torch.cat([self._c, self._c.new_tensor([0, 1])])

    def _pass_by(self, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
        """Numbers of S at each step: of what was before, and of A and C as they were at the window's end."""
        coefficients, numbers = [step.coefficients for step in steps], LowRank()
        numbers.a, numbers.c = self._a, self._c
        s = numbers.pass_by(coefficients)[:, : len(self._a)]
        self._a, self._c = numbers.a[: len(self._a)], numbers.c[: len(self._c)]
        return s, LowRank().pass_by(coefficients)[:, :FIRST]

    def _times_A_and_C(self, V: Tensor) -> list[Tensor]:
        """V Aᵀ and V Cᵀ in numbers of D and of V itself, (R, m + R); the latter unless C is 0."""
        out = []
        for n in (self._a, self._c) if bool(self._c.any()) else (self._a,):
            out.append(torch.cat([V.new_zeros(len(V), self.rows), float(n[0]) * torch.eye(len(V)).to(V)], 1))
        for j, (W, *both) in enumerate(self._windows):
            products = V @ W.T
            for n, b in zip((self._a, self._c), out, strict=False):
                of_both = n[FIRST + 2 * j :].tolist()
                terms = [x * scale for x, scale in zip(both, of_both, strict=False) if x is not None and scale]
                if terms:
                    b[:, : terms[0].shape[1]] += products @ (terms[0] if len(terms) == 1 else terms[0] + terms[1])
        return out

    def _times_S(self, rows: Tensor, s: Tensor) -> Tensor:
        """rows Sᵀ without s₁ rows, (N, m)."""
        out = rows.new_zeros(len(rows), self.rows)
        for j, (W, *both) in enumerate(self._windows):
            products = rows @ W.T
            for k, x in enumerate(both):
                if x is not None:
                    out[:, : x.shape[1]] += (products * s[:, FIRST + 2 * j + k, None]) @ x
        return out

    def _times_D(self, numbers: Tensor, out: Tensor) -> Tensor:
        """`out` + numbers D, for the first rows of D."""
        at = 0
        for rows in self._D:
            if at >= numbers.shape[1]:
                break
            out.addmm_(numbers[:, at : at + len(rows)], rows)
            at += len(rows)
        return out


def _combined(n: Tensor, basis: Sequence[Tensor], M: Tensor) -> Tensor:
    """X or Y of the window, (R, m + R + clipped), from its numbers for each column."""
    out = n[FIRST:].T @ M
    for k, b in enumerate(basis):
        out[:, : b.shape[1]] += n[k, :, None] * b
    return out
