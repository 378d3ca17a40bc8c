"""From the run on disk to the steps that the mathematics takes: backward or forward, in chunks, in bounded memory."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..maths.blocked import CHUNK_ROWS
from ..maths.steps import NAMES, Coefficients, Step
from ..store import RowBlock, RunStore, StepTable
from .prefetch import ahead
from .windows import Compressed

CHUNK_BYTES = 32 << 20  # of rows read at once, of which a sweep holds up to three: enough of them for large products


class Chunk(NamedTuple):
    """Consecutive whole steps, in time order."""

    first_step: int
    row_start: int
    steps: list[Step]
    block: RowBlock


def backward(store: RunStore, at: int, *, dtype: torch.dtype, down_to: int = 0) -> Iterator[Chunk]:
    """Chunks of the steps from `down_to` to `at`, latest first.

    They are read in a thread of their own, with tables of its own: two threads cannot read one table of Lance.
    """
    store = RunStore.open(store.path)
    kept = Compressed(store, dtype)
    blocks = store.backward(at, dtype=dtype, lo_step=down_to, chunk_bytes=CHUNK_BYTES, multiple=CHUNK_ROWS.least)
    return ahead(_chunk(store, block, dtype, kept) for block in blocks)


def forward(
    store: RunStore, at: int, *, dtype: torch.dtype, chunk_bytes: int = 8 << 20, start: int = 0
) -> Iterator[Chunk]:
    """Chunks of the steps from `start` to `at`, earliest first, with the ids of their samples."""
    kept = Compressed(store, dtype)
    size = store.width * dtype.itemsize * (1 + store.curvature_rows)
    table = store.steps(0, at)
    lo = start
    while lo < at:
        hi = lo + 1
        while hi < at and (table.row_start[hi] + table.rows[hi] - table.row_start[lo]) * size <= chunk_bytes:
            hi += 1
        first, last = int(table.row_start[lo]), int(table.row_start[hi - 1] + table.rows[hi - 1])
        yield _chunk(store, store.read(first, last, samples=True, dtype=dtype, curvature=True), dtype, kept)
        lo = hi


def _chunk(store: RunStore, block: RowBlock, dtype: torch.dtype, kept: Compressed) -> Chunk:
    groups = torch.tensor([b["group"] for b in store.config["blocks"]])
    owner = groups.repeat_interleave(torch.tensor(store.dims))  # (p,) optimizer group of each coordinate
    lo, hi = int(block.step[0]), int(block.step[-1]) + 1
    steps = kept.fill(_steps(block, store.steps(lo, hi), owner, dtype), lo)
    P = store.diagonal(lo, hi)
    if P is not None:
        steps = [s._replace(coefficients=s.coefficients._replace(P=x)) for s, x in zip(steps, P.to(dtype), strict=True)]
    return Chunk(lo, block.row_start, steps, block)


def slices(store: RunStore, per_layer: bool = True) -> list[slice]:
    """Where each block lies in a row; the whole row where all are taken together."""
    if not per_layer:
        return [slice(0, store.width)]
    return [slice(lo, hi) for lo, hi in pairwise([0, *accumulate(store.dims)])]


def cut(step: Step, where: slice) -> Step:
    """The same step seen by the coordinates of one block; ⟨g, ∇L⟩ stays that of the whole."""
    parts = Coefficients(*(x[where] if isinstance(x, Tensor) else x for x in step.coefficients))
    V = None if step.V is None else step.V[:, where]
    whole = where.stop - where.start == step.G.shape[1]
    return step._replace(G=step.G[:, where], V=V, coefficients=parts, orthogonal=step.orthogonal and whole)


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
    """Rows √κ h of a step, and their ⟨√κ h, ∇L⟩; nothing where the gradient rows are the curvature rows."""
    if block.curvature is None or block.kappa is None or block.hdot is None:
        return None, None
    root = block.kappa[lo:hi].sqrt()  # (B, R)
    V = block.curvature[lo:hi] * root.to(dtype)[..., None]
    return V.flatten(0, 1), (block.hdot[lo:hi] * root).to(dtype).flatten()


def _coefficients(groups: dict[str, Sequence[float]], owner: Tensor, dtype: torch.dtype) -> Coefficients:
    """Numbers where all groups agree, vectors over the coordinates where they differ."""
    found: dict[str, float | Tensor] = {}
    for name, values in groups.items():
        same = len(set(values)) == 1
        found[name] = values[0] if same else torch.tensor(values, dtype=dtype)[owner]
    return Coefficients(**found)
