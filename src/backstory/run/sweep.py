r"""From the run on disk to the steps that the mathematics takes: backward or forward, in chunks, in bounded memory.

Steps of a run with windows get the curvature of their window (`store.windows`), beside what their occurrences keep of their own; those
of other runs have their own alone.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import StoreError
from ..maths.blocked import CHUNK_ROWS
from ..maths.shared_curvature import orthogonal
from ..maths.steps import NAMES, Coefficients, Step
from ..maths.windows import Span
from ..store import RowBlock, RunStore, StepTable
from ..store.windows import Window
from ..workers import ahead

CHUNK_BYTES = 32 << 20  # of rows read at once, of which a sweep holds up to three: enough of them for large products


class Chunk(NamedTuple):
    """Consecutive whole steps, in time order."""

    first_step: int
    row_start: int
    steps: list[Step]
    block: RowBlock


class Shared:
    """The curvature of a run's windows while a sweep passes over it; holds one window at a time."""

    def __init__(self, store: RunStore, dtype: torch.dtype) -> None:
        self._store, self._dtype = store, dtype
        self._spans: list[Span] = store.windows.spans(store.n_steps()) if store.has_windows else []
        self._current: tuple[Span, Window, dict[int, int]] | None = None  # and the row of `d` of each clipped step

    def fill(self, steps: Sequence[Step], first: int) -> list[Step]:
        """The steps, numbered from `first` on, with the curvature that is kept for them; as they are in other runs."""
        return [self._filled(s, t) for t, s in enumerate(steps, first)] if self._spans else list(steps)

    def _filled(self, step: Step, t: int) -> Step:
        if self._current is None or not self._current[0][0] <= t < self._current[0][1]:
            span = next((s for s in self._spans if s[0] <= t < s[1]), None)
            if span is None:
                raise StoreError(
                    f"the curvature of step {t} is missing from {self._store.path}. Restore its curvature-*.safetensors from a copy of the "
                    "run, or record it again."
                )
            clipped = np.flatnonzero(self._store.steps(*span).clip < 1).tolist()
            rows = {span[0] + k: i for i, k in enumerate(clipped)}
            self._current = span, self._store.windows.read(span, self._dtype), rows
        _, (V, d), row = self._current
        gradient = None if step.clip >= 1 else step.w @ step.G if d is None else d[row[t]]
        dot_v = None if gradient is None else V @ gradient
        if step.V is None:
            return step._replace(V=V, dot_v=dot_v, orthogonal=True)
        dots = None if dot_v is None or step.dot_v is None else torch.cat([step.dot_v, dot_v])
        return step._replace(V=torch.cat([step.V, V]), dot_v=dots, shared=len(V))


def backward(store: RunStore, at: int, *, dtype: torch.dtype, down_to: int = 0, own: bool = False) -> Iterator[Chunk]:
    """Chunks of the steps from `down_to` to `at`, latest first.

    Steps have the curvature of their window, where there are windows; with `own` that of their own gradients there. They are read in a thread of their own, with tables of its own: two threads cannot read one table of Lance.
    """
    store = RunStore.open(store.path)
    windows = Shared(store, dtype)
    blocks = store.chunks(at, dtype=dtype, lo_step=down_to, chunk_bytes=CHUNK_BYTES, multiple=CHUNK_ROWS.least)
    return ahead(_chunk(store, block, dtype, windows) for block in blocks)


def forward(store: RunStore, at: int, *, dtype: torch.dtype, start: int = 0) -> Iterator[Chunk]:
    """Chunks of the steps from `start` to `at`, earliest first, with the ids of their samples."""
    windows = Shared(store, dtype)
    blocks = store.chunks(at, dtype=dtype, lo_step=start, samples=True, earliest_first=True)
    return (_chunk(store, block, dtype, windows) for block in blocks)


def _chunk(store: RunStore, block: RowBlock, dtype: torch.dtype, windows: Shared) -> Chunk:
    groups = torch.tensor([b["group"] for b in store.config["blocks"]])
    owner = groups.repeat_interleave(torch.tensor(store.dims))  # (p,) optimizer group of each coordinate
    lo, hi = int(block.step[0]), int(block.step[-1]) + 1
    steps = windows.fill(_steps(block, store.steps(lo, hi), owner, dtype), lo)
    P = store.diagonal(lo, hi)
    if P is not None:
        steps = [s._replace(coefficients=s.coefficients._replace(P=x)) for s, x in zip(steps, P.to(dtype), strict=True)]
    return Chunk(lo, block.row_start, steps, block)


def slices(store: RunStore, per_layer: bool = True) -> list[slice]:
    """Where each block lies in a row; the whole row where all are taken together."""
    if not per_layer:
        return [slice(0, store.width)]
    return [slice(lo, hi) for lo, hi in pairwise([0, *accumulate(store.dims)])]


class Layers:
    """Steps as seen by each of several blocks of coordinates, or by one block of all of them.

    Curvature rows that steps share are orthogonal in all coordinates together, and no longer in those of one block. They are made so
    there, once for the steps that share them: VᵀV stays what it is, as with V = U W, UᵀU = I, where WᵀW is it too.
    """

    def __init__(self, where: Sequence[slice]) -> None:
        self._where = where
        self._V: Tensor | None = None
        self._shared: list[Tensor] = []  # W of each block

    def cut(self, step: Step) -> list[Step]:
        """The step in each block's coordinates; ⟨g, ∇L⟩ stays that of the whole."""
        if len(self._where) == 1:
            return [step]
        if not step.orthogonal or step.V is None:
            return [_cut(step, w) for w in self._where]
        if step.V is not self._V:
            self._V, self._shared = step.V, [orthogonal(step.V[:, w]) for w in self._where]
        return [_turned(_cut(step, w), W) for w, W in zip(self._where, self._shared, strict=True)]


def _cut(step: Step, where: slice) -> Step:
    parts = Coefficients(*(x[where] if isinstance(x, Tensor) else x for x in step.coefficients))
    V = None if step.V is None else step.V[:, where]
    return step._replace(G=step.G[:, where], V=V, coefficients=parts, orthogonal=False)


def _turned(step: Step, W: Tensor) -> Step:
    """The step with W = UᵀV for its V, and Uᵀ⟨v, ∇L⟩ for what its rows have of ⟨v, ∇L⟩."""
    dots = None
    if step.dot_v is not None and step.V is not None:
        dots = W @ (step.dot_v @ step.V) / torch.linalg.vector_norm(W, dim=1).square()
    return step._replace(V=W, dot_v=dots, orthogonal=True)


def _steps(block: RowBlock, table: StepTable, owner: Tensor, dtype: torch.dtype) -> list[Step]:
    assert block.rows is not None
    out, lo = [], 0
    for i, n in enumerate(table.rows.tolist()):
        hi = lo + n
        V, dot_v = _curvature(block, lo, hi, dtype)
        out.append(
            Step(
                G=block.rows[lo:hi],
                w=block.weight[lo:hi].to(dtype),
                coefficients=_coefficients({k: table.groups[k][i].tolist() for k in NAMES}, owner, dtype),
                clip=float(table.clip[i]),
                norm=float(table.norm[i]),
                dot_g=block.gdot[lo:hi].to(dtype),
                share=float(table.coverage[i]),
                V=V,
                dot_v=dot_v,
            )
        )
        lo = hi
    return out


def _curvature(block: RowBlock, lo: int, hi: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Rows √κ h of a step, and their ⟨√κ h, ∇L⟩; nothing where the gradient rows are the curvature rows.

    Where occurrences keep what their gradients hold of their curvature, rows √(w κ) g.
    """
    if block.own is not None and block.rows is not None:
        scale = (block.weight[lo:hi] * block.own[lo:hi]).sqrt().to(dtype)
        return scale[:, None] * block.rows[lo:hi], scale * block.gdot[lo:hi].to(dtype)
    if block.curvature is None or block.kappa is None or block.hdot is None:
        return None, None
    root = block.kappa[lo:hi].sqrt()  # (B, R)
    V = block.curvature[lo:hi] * root.to(dtype)[..., None]
    return V.flatten(0, 1), (block.hdot[lo:hi] * root).to(dtype).flatten()


def _coefficients(groups: dict[str, Sequence[float]], owner: Tensor, dtype: torch.dtype) -> Coefficients:
    """Numbers where all groups agree, vectors over the coordinates where they differ."""
    return Coefficients(
        **{
            name: values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=dtype)[owner]
            for name, values in groups.items()
        }
    )
