r"""Influence checkpointing (Algorithm 2): a run split into segments that several processes embed in parallel.

Each segment keeps the embeddings of its own rows on the state at its end, and Σ, which carries what is before it to its end
(`maths.blocked`). A question at any boundary needs no new sweep:  x = [v; 0] at the boundary, and for each segment before it,
last first,

    influence of its rows = E x,      x ← Σᵀ x

Boundaries are the run's checkpoints, and steps between them until there are as many segments as asked for. A segment that is
complete is never computed again; one that was interrupted leaves nothing behind.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError, UsageError
from ..maths.blocked import ALGORITHM, Propagator
from ..maths.steps import Contraction
from ..maths.windows import Span
from ..results.recording_report import RecordingReport
from ..store import RunStore
from ..workers import spread
from .embed import EmbedReport, Form, Progress, embed_rows, report
from .recording_report import merged, read_report
from .scoring import pieces
from .sweep import slices

ROUNDS = 3  # of trying again after the death of a worker


def boundaries(store: RunStore, at: int, count: int) -> list[Span]:
    """`count` segments or more that end at every checkpoint up to `at`, about equal in rows."""
    if not 1 <= count <= at:
        raise UsageError(f"segments must be between 1 and {at}, the number of steps, got {count}.")
    rows = store.steps(0, at).row_start.tolist()
    ends = sorted({0, at, *(c for c in store.checkpoints() if 0 < c < at)})
    while len(ends) <= count:
        spans = [(lo, hi) for lo, hi in itertools.pairwise(ends) if hi - lo > 1]
        lo, hi = max(spans, key=lambda s: (rows[s[1] - 1] - rows[s[0]], s[1] - s[0]))
        middle = (rows[lo] + rows[hi - 1]) / 2
        ends = sorted({*ends, min(range(lo + 1, hi), key=lambda t: abs(rows[t] - middle))})
    return list(itertools.pairwise(ends))


def embed_segments(
    store: RunStore, spans: Sequence[Span], form: Form, *, workers: int, progress: Progress | None = None
) -> EmbedReport:
    """Compute what is missing of these segments, in `workers` processes."""
    began, at = time.perf_counter(), spans[-1][1]
    momentum = bool((store.steps(0, at).groups["momentum"] != 0).any())
    settings = form.settings(parts=2 if momentum else 1)

    def missing() -> list[Span]:
        known = {span for span, facts in store.segments().items() if fits(facts, settings)}
        return [span for span in spans if span not in known]

    for attempt in range(ROUNDS):
        left = missing()
        try:
            for done, _ in enumerate(_computed(store, left, form, momentum, workers), len(spans) - len(left) + 1):
                if progress is not None:
                    progress(done, len(spans))
            break
        except BrokenProcessPool as error:
            if attempt == ROUNDS - 1:
                raise StoreError(
                    f"worker processes were killed {ROUNDS} times, and {len(missing())} of {len(spans)} segments are "
                    "missing. Is there enough memory for each worker's propagator? Finished segments are kept: run "
                    "it again with fewer workers."
                ) from error
    measured, seconds = report_of(store, spans), time.perf_counter() - began
    return report(store, at, form, measured, seconds, segments=len(spans))


def _computed(store: RunStore, spans: Sequence[Span], form: Form, momentum: bool, workers: int) -> Iterator[object]:
    """Computes these segments, and yields whenever one is done."""
    jobs = [(store.path, span, form, momentum) for span in reversed(spans)]
    return spread(_work, jobs, workers) if min(workers, len(jobs)) > 1 else itertools.starmap(_work, jobs)


def compute(path: Path, span: Span, form: Form, momentum: bool) -> None:
    """Embed one segment and write it."""
    store, settings, made = RunStore.open(path), form.settings(parts=2 if momentum else 1), list[Propagator]()
    rows = embed_rows(store, span, form, settings, made)
    store.write_segment(span, rows, lambda: {f"{i:04d}": p.sigma for i, p in enumerate(made)}, settings, form.encoding)


_work = compute  # what a process does; tests let it die


def fits(facts: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a stored segment was computed in this way."""
    return bool(settings.items() <= facts["settings"].items())


def path_to(store: RunStore, at: int, per_layer: bool, contraction: Contraction) -> list[Span]:
    """The stored segments that lead from the first step to `at`, computed in this form; empty where there are none."""
    wanted = {"per_layer": per_layer, "contraction": contraction, "algorithm": ALGORITHM}
    known = {span: f["settings"]["parts"] for span, f in store.segments().items() if fits(f, wanted)}
    for parts in sorted(set(known.values())):
        if path := _path([span for span, n in known.items() if n == parts], at):
            return path
    return []


def _path(spans: Sequence[Span], at: int) -> list[Span]:
    """Spans from 0 to `at`, one after the other, the longest ones where there is a choice; empty where there is no way."""
    for span in sorted(s for s in spans if s[1] == at):
        before = _path(spans, span[0]) if span[0] else []
        if before or span[0] == 0:
            return [*before, span]
    return []


def by_segments(
    store: RunStore, spans: Sequence[Span], queries: Tensor, per_layer: bool, progress: Progress | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Scores (first row, (Q, n)) of all rows, segment by segment."""
    facts, where = store.segments(), slices(store, per_layer)
    momentum = facts[spans[-1]]["settings"]["parts"] == 2
    x = torch.cat([queries, torch.zeros_like(queries)], 1) if momentum else queries
    total, done = sum(facts[span]["rows"] for span in spans), 0
    for span in reversed(spans):
        first = facts[span]["first_row"]
        for lo, hi in pieces(facts[span]["rows"], x.shape[1]):
            yield first + lo, x @ store.read_segment(span, lo, hi, dtype=x.dtype).T
            done += hi - lo
            if progress is not None:
                progress(done, total)
        x = _through(x, store.segment_propagator(span), where, store.width)


def vectors_at(store: RunStore, spans: Sequence[Span], per_layer: bool) -> Iterator[tuple[int, Tensor]]:
    """Embeddings (first row, (n, p)) of all rows on the model at the end of the last span; last rows first."""
    facts, where, p = store.segments(), slices(store, per_layer), store.width
    onward: Tensor | None = None  # (p, n): what carries the end of a segment to the end of the last one
    for span in reversed(spans):
        E = store.read_segment(span, 0, facts[span]["rows"])
        yield facts[span]["first_row"], E[:, :p] if onward is None else E @ onward.T
        onward = torch.eye(p, E.shape[1], dtype=E.dtype) if onward is None else onward
        onward = _through(onward, store.segment_propagator(span), where, p)


def _through(x: Tensor, sigmas: dict[str, Tensor], where: Sequence[slice], p: int) -> Tensor:
    """x Σ: rows on the state at the end of a segment as rows on the state at its beginning, block by block (of θ and of m)."""
    out = torch.empty_like(x)
    for name, w in zip(sorted(sigmas), where, strict=True):
        columns = [i for start in range(0, x.shape[1], p) for i in range(start + w.start, start + w.stop)]
        out[:, columns] = x[:, columns] @ sigmas[name].to(x.dtype)
    return out


def report_of(store: RunStore, spans: Sequence[Span]) -> RecordingReport:
    """The reports on these segments as one."""
    facts = store.segments()
    return merged([x for span in spans if (x := read_report(facts[span]["settings"])) is not None])
