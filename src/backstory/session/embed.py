"""Data value embeddings of a whole run: one backward sweep, written to disk as it goes.

Knows nothing of models or queries.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import NumericalError
from ..maths.propagation import Propagator
from ..maths.steps import growth
from ..store import RunStore
from .sweep import Chunk, backward, cut, slices

Progress = Callable[[int, int], None]  # (steps done, steps in all)


@dataclass
class EmbedReport:
    """What a sweep did and saw."""

    at: int
    steps: int
    occurrences: int = 0
    dims: int = 0
    joint: bool = True
    form: str = "implicit"
    seconds: float = 0.0
    largest_growth: float = 0.0  # rate × curvature over its stable limit; above 1 a literal step expands
    largest_growth_step: int | None = None
    expanding_steps: list[int] = field(default_factory=list)  # in the literal form only

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def embed(
    store: RunStore,
    at: int,
    *,
    joint: bool = True,
    gamma: float | None = None,
    dtype: torch.dtype = torch.float32,
    encoding: str = "float16",
    progress: Progress | None = None,
) -> EmbedReport:
    """Write the embeddings of all occurrences before step `at`, on the model at `at`."""
    report = EmbedReport(at, at, dims=store.width, joint=joint, form="literal" if gamma == 0 else "implicit")
    began = time.perf_counter()
    where = [slice(0, store.width)] if joint else slices(store)
    propagators = [Propagator(w.stop - w.start, dtype=dtype, gamma=gamma) for w in where]

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for chunk in backward(store, at, dtype=dtype):
            _watch(chunk, report)
            E = torch.cat([_embed_block(p, chunk, w, joint) for p, w in zip(propagators, where, strict=True)], 1)
            _check(E, chunk)
            report.occurrences += len(E)
            if progress is not None:
                progress(at - chunk.first_step, at)
            yield chunk.row_start, E

    settings = {
        "joint": joint,
        "gamma": gamma,
        "dtype": str(dtype).removeprefix("torch."),
        "encoding": encoding,
    }
    store.write_embeddings(at, blocks(), settings, encoding)
    report.seconds = time.perf_counter() - began
    return report


def _embed_block(propagator: Propagator, chunk: Chunk, where: slice, joint: bool) -> Tensor:
    steps = chunk.steps if joint else [cut(s, where) for s in chunk.steps]
    return torch.cat(propagator.embed(steps))


def _watch(chunk: Chunk, report: EmbedReport) -> None:
    """Keep the largest rate × curvature, and in the literal form every step that expands."""
    for back, step in enumerate(reversed(chunk.steps)):
        number, found = chunk.first_step + len(chunk.steps) - 1 - back, growth(step)
        if found > report.largest_growth:
            report.largest_growth, report.largest_growth_step = found, number
        if found > 1 and report.form == "literal":
            report.expanding_steps.insert(0, number)


def _check(E: Tensor, chunk: Chunk) -> None:
    if not bool(E.isfinite().all()):
        raise NumericalError(
            f"the propagator overflowed in steps {chunk.first_step} to {chunk.first_step + len(chunk.steps) - 1}: "
            "in the literal form noisy curvature can expand step after step. Use the implicit form (gamma=None), or "
            "ask at a checkpoint before the expansion."
        )
