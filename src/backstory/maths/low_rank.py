"""Steps that the propagator has passed and not multiplied out yet (third part of `blocked`).

With A₀, C₀ its matrices, and H, W the rows that step j left,

    A = a₁ A₀ + a₂ C₀ − Σ_j a_j H_jᵀ W_j        C the same with c, S of a step with s

so the recursion runs on the numbers a and c alone, and products with A become products with rows.

Shapes:  R rows, p kept coordinates, n numbers of an embedding (p, or 2p in a segment with momentum).
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .steps import Coefficients

FIRST = 2  # numbers of A₀ and C₀ come before those of the steps


class Terms(NamedTuple):
    """What steps taken together left."""

    H: Tensor  # (R, n) minus the effects of the rows, times whatever W is not multiplied by
    W: Tensor  # (R, p)
    number: Tensor  # (R,) where the number of each row's step stands in a and c


class LowRank:
    """The numbers of A and C, and the rows they belong to."""

    def __init__(self) -> None:
        self.a, self.c = torch.eye(FIRST, dtype=torch.float64)
        self._terms: list[Terms] = []

    @property
    def steps(self) -> int:
        """How many steps have been passed (products that were added count as one or two)."""
        return len(self.a) - FIRST

    @property
    def rows(self) -> int:
        """How many rows they have left."""
        return sum(len(terms.W) for terms in self._terms)

    def pass_by(self, steps: Sequence[Coefficients]) -> Tensor:
        """Numbers of S at each of these steps, (n, numbers), in float64; a and c are then those before the first of them."""
        n, known = len(steps), len(self.a)
        a, c = (np.concatenate([x.numpy(), np.zeros(n)]) for x in (self.a, self.c))
        s = np.zeros((n, known + n))
        for i in reversed(range(n)):
            k = steps[i]
            u = c - a * (k.pace * k.a)
            s[i] = u * (1 - k.tau) - a * (k.pace * k.n)
            a = a * (1 - k.rate * k.decay) + s[i] * k.l2
            a[known + i] += 1
            c = u * k.momentum
        self.a, self.c = torch.from_numpy(a), torch.from_numpy(c)
        return torch.from_numpy(s)

    def add(self, terms: Terms) -> None:
        """What the steps that were passed last left."""
        self._terms.append(terms)

    def add_products(self, X: Tensor, Y: Tensor, V: Tensor) -> None:
        """Xᵀ V, of A alone, and Yᵀ V, of C alone; X and Y (R, n), V (R, p)."""
        for M, a, c in ((X, 1.0, 0.0), (Y, 0.0, 1.0)):
            if bool(M.any()):
                self._terms.append(Terms(-M, V, torch.full((len(V),), len(self.a))))
                self.a, self.c = F.pad(self.a, (0, 1), value=a), F.pad(self.c, (0, 1), value=c)

    def subtract(self, numbers: Tensor, out: Tensor) -> Tensor:
        """`out` − Σ_j numbers_j H_jᵀ W_j."""
        for H, W, number in self._terms:
            of_rows = numbers[number]
            if bool(of_rows.any()):
                out.addmm_((H if bool((of_rows == 1).all()) else H * of_rows.to(H)[:, None]).T, W, alpha=-1)
        return out

    def times(self, X: Tensor, s: Tensor, out: Tensor) -> Tensor:
        """`out` − Σ_j s_j X W_jᵀ H_j, for rows X (N, p) and the numbers s of each, (N, numbers)."""
        for W, terms in self._by_rows():
            products = X @ W.T
            for H, _, number in terms:
                out.addmm_(products * s.index_select(1, number).to(X), H, alpha=-1)
        return out

    def times_alike(self, X: Tensor, numbers: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """The same where all rows have the same numbers: for each of several, into its own `out`."""
        for W, terms in self._by_rows():
            products = X @ W.T
            for s, out in zip(numbers, outs, strict=True):
                scaled = [H * s[number].to(H)[:, None] for H, _, number in terms]
                out.addmm_(products, reduce(torch.add, scaled), alpha=-1)

    def _by_rows(self) -> Iterator[tuple[Tensor, list[Terms]]]:
        """The terms, those together that follow each other with the same rows W."""
        for _, terms in groupby(self._terms, key=lambda x: id(x.W)):
            same = list(terms)
            yield same[0].W, same
