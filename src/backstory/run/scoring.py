"""Scores of a run's occurrences for queries, streamed: by reverse sweep (adjoint) or from stored embeddings."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import NumericalError
from ..maths.adjoint import Adjoint
from ..maths.steps import Contraction
from ..store import RunStore
from .embed import Progress
from .recording_report import Watch
from .sweep import Layers, backward, slices

ROWS_AT_ONCE = 4096
PIECE = 16 << 20  # bytes of rows that are multiplied at once: memory that is used again costs less than new memory
Scores = Iterator[tuple[int, Tensor]]  # (first row, (Q, n)), in any order, each row once


def by_adjoint(
    store: RunStore,
    queries: Tensor,
    at: int,
    *,
    per_layer: bool,
    contraction: Contraction,
    progress: Progress | None,
    watch: Watch | None = None,
) -> Scores:
    """Carry the queries backward through the recorded steps; `watch` sees them pass."""
    where = slices(store, per_layer)
    layers = Layers(where)
    adjoints = [Adjoint(queries[:, w], contraction=contraction) for w in where]
    for chunk in backward(store, at, dtype=queries.dtype):
        if watch is not None:
            watch.see(chunk)
        columns: list[Tensor] = []
        for step in reversed(chunk.steps):
            parts = [a.influence(part) for a, part in zip(adjoints, layers.cut(step), strict=True)]
            columns.insert(0, torch.stack(parts).sum(0))
        if progress is not None:
            progress(at - chunk.first_step, at)
        scores = torch.cat(columns, 1)
        if not bool(scores.isfinite().all()):
            raise NumericalError(
                f"influences overflowed at step {chunk.first_step} or later: with contraction='never', curvature can "
                "grow step after step. Use contraction='auto'."
            )
        yield chunk.row_start, scores


def by_embeddings(
    store: RunStore, queries: Tensor, at: int, n_rows: int, progress: Progress | None, E: Tensor | None = None
) -> Scores:
    """One product with the embeddings that `embed` wrote: `E` (N, p) where they are in memory, else from disk."""
    for lo, hi in pieces(n_rows, store.width):
        part = store.read_embeddings(at, lo, hi, dtype=queries.dtype) if E is None else E[lo:hi].to(queries.dtype)
        if progress is not None:
            progress(hi, n_rows)
        yield lo, queries @ part.T  # (Q, n)


def pieces(n_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Row numbers (from, to) that fit into memory at once."""
    size = max(1, min(ROWS_AT_ONCE, PIECE // (4 * max(1, width))))
    for lo in range(0, n_rows, size):
        yield lo, min(n_rows, lo + size)


def collect(scores: Scores, n_queries: int, n_rows: int) -> Tensor:
    """All scores, (Q, N) in float64."""
    out = torch.zeros(n_queries, n_rows, dtype=torch.float64)
    for lo, part in scores:
        out[:, lo : lo + part.shape[1]] = part
    return out


def collect_best(scores: Scores, n_queries: int, k: int) -> tuple[Tensor, Tensor]:
    """`(values, row numbers)` (Q, ≤ 2k): the k highest and the k lowest of each query; memory does not grow with N."""
    values, rows = torch.empty(n_queries, 0, dtype=torch.float64), torch.empty(n_queries, 0, dtype=torch.int64)
    for lo, part in scores:
        ends = _extremes(part, k)
        values, rows = torch.cat([values, part.gather(1, ends).double()], 1), torch.cat([rows, ends + lo], 1)
        order = _extremes(values, k)
        values, rows = values.gather(1, order), rows.gather(1, order)
    return values, rows


def _extremes(values: Tensor, k: int) -> Tensor:
    """Places of the k highest and the k lowest of each line, in falling order; of all where there are no more."""
    if values.shape[1] <= 2 * k:
        return values.argsort(1, descending=True)
    high = values.topk(k, 1).indices
    rest = values.scatter(1, high, math.inf)  # where values are equal, no place may be at both ends
    return torch.cat([high, rest.topk(k, 1, largest=False).indices.flip(1)], 1)
