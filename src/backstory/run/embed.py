"""Data value embeddings of a whole run: one backward sweep, written to disk as it goes."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import NumericalError, UsageError
from ..maths.blocked import ALGORITHM, Propagator
from ..maths.curvature import CURVATURE
from ..maths.encoding import all_finite, is_coarse
from ..maths.steps import Contraction
from ..maths.windows import Span
from ..results.recording_report import RecordingReport
from ..results.row import Row
from ..store import RunStore
from ..workers import ahead
from .recording_report import Watch
from .sweep import Chunk, Layers, backward, slices

Progress = Callable[[int, int], None]  # (steps done, steps in all); may be called in another thread than the caller's
ContractionChoice = Contraction | Literal["auto"]  # see `contraction_of`


@dataclass(frozen=True)
class EmbedReport(Row):
    """What a sweep did and saw."""

    at: int
    steps: int
    occurrences: int
    dims: int
    per_layer: bool
    form: str
    seconds: float
    largest_growth: float  # rate × curvature over its stable limit; above 1 a literal step expands
    largest_growth_step: int | None
    expanding_steps: list[int]  # in the literal form only
    segments: int


class Form(NamedTuple):
    """How embeddings are computed and kept; what was computed otherwise is not used."""

    per_layer: bool
    contraction: Contraction
    dtype: str
    encoding: str

    def settings(self, **others: Any) -> dict[str, Any]:
        """What is kept beside them."""
        return {**self._asdict(), "algorithm": ALGORITHM, **others}


def embed(store: RunStore, at: int, form: Form, *, progress: Progress | None = None) -> EmbedReport:
    """Write the embeddings of all occurrences before step `at`, on the model at `at`."""
    began, settings = time.perf_counter(), form.settings()
    # made in a thread of its own, and with it what it changes: modes of torch belong to threads
    with closing(ahead(embed_rows(store, (0, at), form, settings, [], progress))) as rows:
        store.write_embeddings(at, rows, settings, form.encoding)
    measured = RecordingReport.from_dict(settings["recording"])
    return report(store, at, form, measured, time.perf_counter() - began)


def embed_rows(
    store: RunStore,
    span: Span,
    form: Form,
    settings: dict[str, Any],
    made: list[Propagator],
    progress: Progress | None = None,
) -> Generator[tuple[int, Tensor]]:
    """`(first row, E)` of the steps of a span on the state at its end, θ's numbers before m's; last rows first.

    The propagators of the blocks are added to `made`, and at the end what was measured to `settings`, which is stored beside E.
    """
    dtype, where, watch = getattr(torch, form.dtype), slices(store, form.per_layer), Watch(store, span[1], span[0])
    parts, layers = settings.get("parts", 1), Layers(where)
    made += [Propagator(w.stop - w.start, dtype=dtype, contraction=form.contraction, of_pairs=parts > 1) for w in where]
    for chunk in backward(store, span[1], dtype=dtype, down_to=span[0]):
        watch.see(chunk)
        steps_of = zip(*map(layers.cut, chunk.steps), strict=True)
        blocks = [torch.cat(p.embed(steps)).chunk(parts, 1) for p, steps in zip(made, steps_of, strict=True)]
        E = torch.cat([x for of_state in zip(*blocks, strict=True) for x in of_state], 1)
        _check_finite(E, chunk)
        if progress is not None:
            progress(span[1] - chunk.first_step, span[1])
        yield chunk.row_start, E
    settings["recording"] = watch.done().measured()


def report(
    store: RunStore, at: int, form: Form, measured: RecordingReport, seconds: float, *, segments: int = 1
) -> EmbedReport:
    """On what was embedded."""
    expanding = list(measured.expanding_steps) if form.contraction == "never" else []
    return EmbedReport(
        at, at, store.rows_before(at), store.width, form.per_layer, form_of(form.contraction), seconds,
        measured.largest_growth, measured.largest_growth_step, expanding, segments,
    )  # fmt: skip


def check_options(store: RunStore, *, dtype: torch.dtype, encoding: str, segments: int | None, workers: int) -> None:
    """Raise where an embedding cannot be made so, or would be wrong."""
    for name, count in (("segments", segments), ("workers", workers)):
        if count is not None and (not isinstance(count, Integral) or isinstance(count, bool)):
            raise UsageError(f"{name} must be an integer, got {count!r}.")
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}.")
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}.")
    if is_coarse(encoding) and store.config["diagonal"]:
        raise UsageError(
            f"encoding={encoding!r} is too coarse for a run with {store.config['optimizer']['class']} and projection='full' or "
            "'mask': its diagonal spreads an embedding over many orders of magnitude. Use encoding='float16', or record with projection='learned'."
        )


def form_of(contraction: Contraction) -> str:
    """γ in words."""
    return {"never": "literal", "when_expanding": "implicit where a step expands"}.get(str(contraction), "implicit")


def contraction_of(choice: ContractionChoice, curvature: str, windows: bool) -> Contraction:
    """What "auto" stands for, by what was measured: a step's own rows of groups of positions want the implicit form at every step."""
    if choice == "auto":
        fits = CURVATURE.fullmatch(curvature)
        return "always" if fits and int(fits["groups"] or 1) > 1 and not windows else "when_expanding"
    if choice not in ("always", "never", "when_expanding") and not (isinstance(choice, int | float) and choice > 0):
        raise UsageError(
            f"contraction must be 'auto', 'always', 'never', 'when_expanding' or a number above 0, got {choice!r}."
        )
    return choice


def _check_finite(E: Tensor, chunk: Chunk) -> None:
    """Raise where the propagator has overflowed."""
    if not all_finite(E):
        raise NumericalError(
            f"the propagator overflowed in steps {chunk.first_step} to {chunk.first_step + len(chunk.steps) - 1}: "
            "with contraction='never', noisy curvature can grow step after step. Use contraction='auto', or query a "
            "checkpoint before these steps."
        )
