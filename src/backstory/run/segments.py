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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError, UsageError
from ..maths.blocked import ALGORITHM, Propagator, carry, pull
from ..maths.steps import Contraction
from ..results.quality import Quality
from ..store import RunStore
from .embed import EmbedReport, Form, Progress, check_finite, embed_block, report
from .quality import Watch, merged
from .scoring import pieces
from .sweep import Span, backward, slices
from .workers import spread

ROUNDS = 3  # of trying again after the death of a worker
Step = Callable[[Tensor, Tensor], Tensor]  # (N, n), Σ -> (N, n)


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
    began, momentum = time.perf_counter(), has_momentum(store, spans[-1][1])
    settings = form.settings(parts=2 if momentum else 1)
    known = {span for span, facts in store.segments().items() if fits(facts, settings)}
    todo = [span for span in spans if span not in known]
    done = len(spans) - len(todo)
    left = list(todo)
    for attempt in range(ROUNDS):
        try:
            for _ in _computed(store, left, form, momentum, workers):
                done += 1
                if progress is not None:
                    progress(done, len(spans))
            break
        except BrokenProcessPool as error:
            complete = {span for span, facts in store.segments().items() if fits(facts, settings)}
            left = [span for span in todo if span not in complete]
            done = len(spans) - len(left)
            if attempt == ROUNDS - 1:
                raise StoreError(
                    f"worker processes were killed {ROUNDS} times, and {len(left)} of {len(spans)} segments are "
                    "missing. Is there enough memory for each worker's propagator? Finished segments are kept: run "
                    "it again with fewer workers."
                ) from error
    quality, seconds = quality_of(store, spans), time.perf_counter() - began
    return report(store, spans[-1][1], form, quality, seconds, segments=len(spans))


def _computed(store: RunStore, spans: Sequence[Span], form: Form, momentum: bool, workers: int) -> Iterator[Span]:
    jobs = [(store.path, span, form, momentum) for span in reversed(spans)]
    if workers <= 1 or len(spans) <= 1:
        for job in jobs:
            _work(*job)
            yield job[1]
        return
    for k, _ in spread(_work, jobs, workers):
        yield jobs[k][1]


def compute(path: Path, span: Span, form: Form, momentum: bool) -> None:
    """Embed one segment and write it."""
    store, dtype = RunStore.open(path), getattr(torch, form.dtype)
    where = slices(store, form.per_layer)
    watch, settings = Watch(store, span[1], start=span[0]), form.settings(parts=2 if momentum else 1)
    made = [
        Propagator.of_segment(w.stop - w.start, dtype=dtype, contraction=form.contraction, momentum=momentum)
        for w in where
    ]

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for chunk in backward(store, span[1], dtype=dtype, down_to=span[0]):
            watch.see(chunk)
            parts = [embed_block(m, chunk, w, form.per_layer) for m, w in zip(made, where, strict=True)]
            E = _paired(parts, momentum)
            check_finite(E, chunk)
            yield chunk.row_start, E
        settings["quality"] = watch.done().measured()

    def propagator() -> dict[str, Tensor]:
        return {f"{i:04d}": m.sigma.contiguous() for i, m in enumerate(made)}

    store.write_segment(span, blocks(), propagator, settings, form.encoding)


_work = compute  # what a process does; tests let it die


def _paired(parts: Sequence[Tensor], momentum: bool) -> Tensor:
    """Embeddings of all blocks, θ's numbers first and m's after them."""
    if not momentum:
        return torch.cat(list(parts), 1)
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in halves], 1)


def has_momentum(store: RunStore, at: int) -> bool:
    """Whether any step before `at` has momentum."""
    return bool((store.steps(0, at).groups["momentum"] != 0).any())


def fits(facts: dict[str, Any], settings: dict[str, Any], ignoring: Sequence[str] = ()) -> bool:
    """Whether a stored segment was computed in this way."""
    return all(facts["settings"].get(k) == v for k, v in settings.items() if k not in ignoring)


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
        x = _through(x, store.segment_propagator(span), where, store.width, momentum, pull)


def vectors_at(store: RunStore, spans: Sequence[Span], per_layer: bool) -> Iterator[tuple[int, Tensor]]:
    """Embeddings (first row, (n, p)) of all rows on the model at the end of the last span; last rows first."""
    facts, where, p = store.segments(), slices(store, per_layer), store.width
    momentum = facts[spans[-1]]["settings"]["parts"] == 2
    onward: Tensor | None = None  # (p, n): what carries the end of a segment to the end of the last one
    for span in reversed(spans):
        E = store.read_segment(span, 0, facts[span]["rows"])
        yield facts[span]["first_row"], E[:, :p] if onward is None else carry(E, onward)
        onward = torch.eye(p, E.shape[1], dtype=E.dtype) if onward is None else onward
        onward = _through(onward, store.segment_propagator(span), where, p, momentum, pull)


def _through(
    x: Tensor, sigmas: dict[str, Tensor], where: Sequence[slice], p: int, momentum: bool, step: Step
) -> Tensor:
    """`step` with each block's Σ on that block's numbers (of θ and of m)."""
    out = torch.empty_like(x)
    for name, w in zip(sorted(sigmas), where, strict=True):
        columns = [*range(w.start, w.stop), *(range(p + w.start, p + w.stop) if momentum else ())]
        out[:, columns] = step(x[:, columns], sigmas[name].to(x.dtype))
    return out


def quality_of(store: RunStore, spans: Sequence[Span]) -> Quality:
    """The reports on these segments as one."""
    facts = store.segments()
    return merged([Quality.from_dict(facts[span]["settings"]["quality"]) for span in spans])
