r"""Compress a run: change the rank of its curvature or the encoding of its numbers; curvature of single occurrences becomes that of windows.

A run that was recorded with windows keeps them, with fewer of their leading directions. Of one that stores curvature samples of every
occurrence, windows of N occurrences with R rows each and p coordinates are made; what is smaller is kept:

    min(r, N R, p) rows:  the sum itself where r is not below the other two, a sketch of the leading directions otherwise

The compressed run is a run of its own. It is written beside its final place and appears there when it is whole.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import StoreError, UsageError
from ..maths.encoding import check as check_encoding
from ..maths.shared_curvature import Sketch, dual
from ..maths.steps import NAMES, Step, curvature_rows
from ..maths.windows import Span
from ..results.row import Row
from ..store import RunStore, StepRecord, layout
from ..store.bases import is_preconditioned
from ..store.files import fsync
from ..store.schema import STEP_NUMBERS
from ..store.windows import Window
from .embed import Progress
from .sweep import Chunk, forward

RANK = 512  # of a sketch: as good as the full sum where it was measured against retraining
OCCURRENCES = 4  # times the rank make a window: its curvature then takes at most a quarter of its gradient rows' room


@dataclass(frozen=True)
class CompressReport(Row):
    """What was made of a run."""

    path: str
    windows: int
    rows: int  # of curvature, in all windows together
    energy: float  # share of the curvature's trace that they hold
    bytes_before: int
    bytes_after: int


def compress(
    store: RunStore,
    out: Path,
    *,
    rank: int | None,
    windows: int | None,
    encoding: str | None,
    progress: Progress | None,
) -> CompressReport:
    """Write the compressed run to `out`; `store` is open for writing, so that nobody records into it meanwhile."""
    _check(store, out, rank, windows, encoding)
    spans = store.windows.spans(store.n_steps()) if store.has_windows else []
    spans = spans or windows_of(store, windows or max(1, store.n_rows() // (OCCURRENCES * (rank or store.width))))
    partial = _claimed(out)
    try:
        with _made(store, partial, spans, rank, encoding) as new:
            energy, rows = _fill(store, new, spans, rank, progress)
            energy *= store.config.get("compressed", {}).get("energy", 1.0)  # of what was compressed before
            new.update_config(compressed={**new.config["compressed"], "energy": energy})
            _beside(store, new)
        os.rename(partial, out)
        fsync(out.absolute().parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    after = RunStore.open(out).size_bytes()
    before = store.size_bytes(without=("emb-", "seg-"))  # embeddings are not carried over
    return CompressReport(str(out), len(spans), rows, energy, before, after)


def _claimed(out: Path) -> Path:
    """A new folder beside `out`, ours alone."""
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError as error:
        raise StoreError(
            f"{partial} already exists: another `compress` was interrupted or is still running. Delete it and try again."
        ) from error
    return partial


def windows_of(store: RunStore, count: int) -> list[Span]:
    """`count` windows of about as many rows each; fewer where there are fewer steps."""
    table = store.steps()
    ends = table.row_start + table.rows
    wanted = np.linspace(0, float(ends[-1]), count + 1)[1:-1]
    cuts = sorted({0, len(ends), *(int(np.searchsorted(ends, x)) + 1 for x in wanted)})
    return list(pairwise(cuts))


def _check(store: RunStore, out: Path, rank: int | None, windows: int | None, encoding: str | None) -> None:
    if rank is not None and rank < 1:
        raise UsageError(f"rank must be at least 1, or None to keep the full sum, got {rank}.")
    if windows is not None and windows < 1:
        raise UsageError(f"windows must be at least 1, got {windows}.")
    if encoding is not None:
        check_encoding(encoding)
    if store.path.resolve() in out.resolve().parents:
        raise UsageError(f"out must not be inside the run itself, got {str(out)!r}.")
    if out.exists():
        raise StoreError(f"{out} already exists. Choose a new path.")
    if store.n_steps() == 0:
        raise StoreError("the run has no complete step, so there is nothing to compress.")
    if store.has_windows:
        if windows is not None:
            raise UsageError(
                f"windows={windows} cannot be chosen: the run already keeps its curvature by windows. Give rank= or encoding= instead."
            )
    elif not store.curvature_rows and encoding in (None, store.config["encoding"]):
        raise UsageError(
            "this run stores no separate curvature samples (it uses its gradients), so compressing would not make it "
            "smaller. Pass another encoding=, or record with curvature_of='windows'."
        )


def _made(store: RunStore, path: Path, spans: list[Span], rank: int | None, encoding: str | None) -> RunStore:
    """An empty run with the same gradient rows and no curvature rows."""
    ours = (*layout.FIXED, "windows")  # the store fills these in, and no window is open
    config = {k: v for k, v in store.read_config().items() if k not in ours}
    factors = [None if isinstance(block, int) else block for block in store.blocks]
    earlier = store.config.get("compressed", {}).get("rank")
    least = min((x for x in (rank, earlier) if x is not None), default=None)
    config["compressed"] = {"windows": [list(s) for s in spans], "rank": least}
    return RunStore.create(
        path,
        layers=[(layer["name"], layer["dims"]) for layer in store.config["layers"]],
        encoding=encoding or store.config["encoding"],
        n_groups=store.config["groups"],
        config=config,
        diagonal=store.config["diagonal"],
        windows=True,
        own=store.has_own,
        factors=None if store.split else factors,  # sums are no products
    )


def _fill(
    store: RunStore, new: RunStore, spans: list[Span], rank: int | None, progress: Progress | None
) -> tuple[float, int]:
    """Rows and curvature of all windows; the share of the trace that is kept, and the rows of curvature."""
    dtype = torch.float64 if store.config["encoding"] == "float64" else torch.float32
    window_of = _narrowed if store.has_windows else _averaged
    retained = total = 0.0
    count = 0
    for span in spans:
        chunks = _copied(store, new, span, dtype, progress)
        window, kept, whole = window_of(store, span, chunks, dtype, rank)
        new.windows.write(span, window)
        retained, total, count = retained + kept, total + whole, count + len(window.V)
    return retained / total if total else 1.0, count


def _copied(
    store: RunStore, new: RunStore, span: Span, dtype: torch.dtype, progress: Progress | None
) -> Iterator[Chunk]:
    """The chunks of a window, once their gradient rows are in the new run."""
    for chunk in forward(store, span[1], dtype=dtype, start=span[0]):
        new.append(list(_records(store, chunk)))
        yield chunk
        if progress is not None:
            progress(chunk.first_step + len(chunk.steps), store.n_steps())


def _averaged(
    store: RunStore, span: Span, chunks: Iterator[Chunk], dtype: torch.dtype, rank: int | None
) -> tuple[Window, float, float]:
    """A window of steps that have their own curvature, and its trace before and after."""
    sketch, d, preconditioned = Sketch(store.width, rank), list[Tensor](), is_preconditioned(store)
    for chunk in chunks:
        for step in chunk.steps:
            sketch.add(curvature_rows(step) / (span[1] - span[0]) ** 0.5)
            d += [_dual(step)] if preconditioned and step.clip < 1 else []
    return Window(sketch.rows(), torch.stack(d) if d else None), sketch.retained, sketch.total


def _dual(step: Step) -> Tensor:
    assert step.dot_g is not None
    return dual(step.w, step.G, step.dot_g, step.V, step.dot_v)


def _narrowed(
    store: RunStore, span: Span, chunks: Iterator[Chunk], dtype: torch.dtype, rank: int | None
) -> tuple[Window, float, float]:
    """A window with fewer directions; its rows are orthogonal, the largest first."""
    for _ in chunks:
        pass
    V, d = store.windows.read(span, dtype)
    return Window(V[:rank], d), float(V[:rank].square().sum()), float(V.square().sum())


def _records(store: RunStore, chunk: Chunk) -> Iterator[StepRecord]:
    """The steps of a chunk as they are, without curvature rows."""
    lo, hi = chunk.first_step, chunk.first_step + len(chunk.steps)
    table, P, drawn, at = store.steps(lo, hi), store.diagonal(lo, hi), store.random_states(lo, hi), 0
    for i, step in enumerate(chunk.steps):
        rows = slice(at, at + len(step.w))
        of_rows = {name: getattr(chunk.block, name)[rows] for name in ("samples", "weight", "loss", "gdot", "rows")}
        numbers: dict[str, Any] = {name: float(getattr(table, name)[i]) for name in (*STEP_NUMBERS, "trained")}
        groups = {k: table.groups[k][i].tolist() for k in NAMES}
        replays = {
            "batch": int(table.batch[i]),
            "generators": table.generators[i].tolist(),
            "random": drawn.get(lo + i),
        }
        of_rows["own"] = None if chunk.block.own is None else chunk.block.own[rows]
        yield StepRecord(lo + i, groups=groups, P=None if P is None else P[i], **of_rows, **numbers, **replays)
        at = rows.stop


def _beside(store: RunStore, new: RunStore) -> None:
    """What lies beside the rows: bases, checkpoints, query sets, the recipe and its batches, samples."""
    for name in store.tensor_names():
        if not name.startswith(("seg-", "curvature-")):  # embeddings belong to the curvature that made them
            new.save_tensors(name, store.load_tensors(name), store.tensor_metadata(name))
    if (recipe := store.recipe()) is not None:
        new.put_recipe(recipe)
        store.batches.copy_to(new.batches)
    content = store.samples()
    columns = {k: content[k].to_pylist() for k in ("text", "image", "label", "source")}
    if len(content):
        new.put_samples(content["id"].to_pylist(), **columns)
