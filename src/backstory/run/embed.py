"""Data value embeddings of a whole run: one backward sweep, written to disk as it goes."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import NumericalError, UsageError
from ..maths.blocked import ALGORITHM, Propagator
from ..maths.curvature import CURVATURE
from ..maths.encoding import all_finite
from ..maths.steps import Contraction
from ..results.quality import Quality
from ..store import RunStore
from .quality import Watch
from .sweep import Chunk, backward, cut, slices
from .workers import ahead

Progress = Callable[[int, int], None]  # (steps done, steps in all); may be called in another thread than the caller's
ContractionChoice = Contraction | Literal["auto"]  # see `contraction_of`


@dataclass
class EmbedReport:
    """What a sweep did and saw."""

    at: int
    steps: int
    occurrences: int = 0
    dims: int = 0
    per_layer: bool = False
    form: str = "implicit"
    seconds: float = 0.0
    largest_growth: float = 0.0  # rate × curvature over its stable limit; above 1 a literal step expands
    largest_growth_step: int | None = None
    expanding_steps: list[int] = field(default_factory=list)  # in the literal form only
    segments: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def embed(
    store: RunStore,
    at: int,
    *,
    per_layer: bool = False,
    contraction: Contraction = "when_expanding",
    dtype: torch.dtype = torch.float32,
    encoding: str = "float16",
    progress: Progress | None = None,
) -> EmbedReport:
    """Write the embeddings of all occurrences before step `at`, on the model at `at`."""
    report = EmbedReport(at, at, dims=store.width, per_layer=per_layer, form=form_of(contraction))
    began = time.perf_counter()
    where = slices(store, per_layer)
    watch = Watch(store, at)

    def blocks() -> Generator[tuple[int, Tensor]]:
        """Made in a thread of its own, and with it what it changes: modes of torch belong to threads."""
        propagators = [Propagator(w.stop - w.start, dtype=dtype, contraction=contraction) for w in where]
        for chunk in backward(store, at, dtype=dtype):
            watch.see(chunk)
            E = torch.cat([embed_block(p, chunk, w, per_layer) for p, w in zip(propagators, where, strict=True)], 1)
            check_finite(E, chunk)
            report.occurrences += len(E)
            if progress is not None:
                progress(at - chunk.first_step, at)
            yield chunk.row_start, E
        settings["quality"] = watch.done().measured()  # stored beside the embeddings, for every result

    name = str(dtype).removeprefix("torch.")
    settings: dict[str, Any] = {"per_layer": per_layer, "contraction": contraction, "dtype": name, "encoding": encoding}
    settings["algorithm"] = ALGORITHM
    with closing(ahead(blocks())) as made:
        store.write_embeddings(at, made, settings, encoding)
    _take_over(report, watch.done())
    report.seconds = time.perf_counter() - began
    return report


def check_options(store: RunStore, *, dtype: torch.dtype, encoding: str, segments: int | None, workers: int) -> None:
    """Raise where an embedding cannot be made so, or would be wrong."""
    for name, count in (("segments", segments), ("workers", workers)):
        if count is not None and (not isinstance(count, Integral) or isinstance(count, bool)):
            raise UsageError(f"{name} must be an integer, got {count!r}.")
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}.")
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}.")
    if encoding == "int8" and store.config["diagonal"]:
        raise UsageError(
            "encoding='int8' is too coarse for a run with Adam and projection='full' or 'mask': Adam's diagonal "
            "spreads an embedding over many orders of magnitude. Use encoding='float16', or record with "
            "projection='learned'."
        )


def form_of(contraction: Contraction) -> str:
    """γ in words."""
    return (
        "literal"
        if contraction == "never"
        else "implicit where a step expands"
        if contraction == "when_expanding"
        else "implicit"
    )


def contraction_of(choice: ContractionChoice, curvature: str) -> Contraction:
    """What "auto" stands for, by what was measured: rows of groups of positions want the implicit form at every step."""
    if choice == "auto":
        fits = CURVATURE.fullmatch(curvature)
        return "always" if fits and int(fits["groups"] or 1) > 1 else "when_expanding"
    if choice not in ("always", "never", "when_expanding") and not (isinstance(choice, int | float) and choice > 0):
        raise UsageError(
            f"contraction must be 'auto', 'always', 'never', 'when_expanding' or a number above 0, got {choice!r}."
        )
    return choice


def _take_over(report: EmbedReport, quality: Quality) -> None:
    report.largest_growth, report.largest_growth_step = quality.largest_growth, quality.largest_growth_step
    report.expanding_steps = list(quality.expanding_steps) if report.form == "literal" else []


def embed_block(propagator: Propagator, chunk: Chunk, where: slice, per_layer: bool) -> Tensor:
    """Embeddings of a chunk's rows, as the coordinates of one propagator see them."""
    steps = [cut(s, where) for s in chunk.steps] if per_layer else chunk.steps
    return torch.cat(propagator.embed(steps))


def check_finite(E: Tensor, chunk: Chunk) -> None:
    """Raise where the propagator has overflowed."""
    if not all_finite(E):
        raise NumericalError(
            f"the propagator overflowed in steps {chunk.first_step} to {chunk.first_step + len(chunk.steps) - 1}: "
            "with contraction='never', noisy curvature can grow step after step. Use contraction='auto', or query a "
            "checkpoint before these steps."
        )
