"""What one step shows of itself, as it was recorded and as a replay takes it, and how far the two are apart."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..capture import OptimizerReader
from ..capture.batches import BatchDigest
from ..capture.ids import as_text
from ..store import RunStore
from ..store.schema import RowBlock
from .tape import Tape

LOSS, NORM, CLIP = "the loss of its samples", "the gradient norm", "the clipping factor"
AT_ONCE = 256  # steps that are read together


class Numbers(NamedTuple):
    """One step."""

    ids: list[str]
    batch: int | None  # the checksum of its data
    losses: Tensor  # (B,) float64; NaN where they were not recorded
    norm: float
    clip: float
    decays: tuple[float, ...]  # l2 and decoupled weight decay of each group

    def apart(self, other: Self) -> dict[str, float]:
        """Relative differences of what both know."""
        known = ~(self.losses.isnan() | other.losses.isnan()) if len(self.losses) == len(other.losses) else None
        out = {NORM: _relative(self.norm, other.norm), CLIP: _relative(self.clip, other.clip)}
        if known is not None and bool(known.any()):
            gap, size = (float(x[known].norm()) for x in (self.losses - other.losses, other.losses))
            out = {LOSS: gap / size if size else gap, **out}
        return {name: math.inf if math.isnan(x) else x for name, x in out.items()}


def _relative(x: float, y: float) -> float:
    return abs(x - y) / abs(y) if y else abs(x)


class Recorded:
    """The steps of a run."""

    def __init__(self, store: RunStore, length: int) -> None:
        self._store, self._table, self._from = store, store.steps(0, length), -1
        self._block: RowBlock | None = None

    def __getitem__(self, t: int) -> Numbers:
        table, first = self._table, t - t % AT_ONCE
        if first != self._from:
            last = min(first + AT_ONCE, len(table.step)) - 1
            self._from, rows = first, (int(table.row_start[first]), int(table.row_start[last] + table.rows[last]))
            self._block = self._store.read(*rows, rows=False, samples=True)
        assert self._block is not None
        assert self._block.samples is not None
        lo = int(table.row_start[t] - table.row_start[first])
        rows_of = slice(lo, lo + int(table.rows[t]))
        decays = (*table.groups["l2"][t].tolist(), *table.groups["decay"][t].tolist())
        batch = int(table.batch[t])
        return Numbers(
            self._block.samples[rows_of], None if batch < 0 else batch, self._block.loss[rows_of],
            float(table.norm[t]), float(table.clip[t]), decays,
        )  # fmt: skip


class Meter:
    """Reads the steps of a tape as the recorder read those of the run; a context manager, since hooks do it."""

    def __init__(self, tape: Tape, settings: Mapping[str, object]) -> None:
        model, kind = tape.recipe.model, str(settings.get("modelled_as", "auto"))
        self._tape, self._digest = tape, BatchDigest(model)
        self._reader = OptimizerReader(model, tape.optimizer, model_as=kind, clip_norm="varies")

    def __enter__(self) -> Self:
        self._digest.attach()
        self._reader.attach()
        return self

    def __exit__(self, *error: object) -> None:
        self._digest.detach()
        self._reader.detach()

    def take(self, t: int) -> Numbers:
        """Step t of the tape."""
        self._reader.begin()
        self._digest.begin()
        losses = self._tape.take(t)
        reading, batch = self._reader.reading, self._digest.end()
        self._reader.end()
        assert reading is not None
        decays = (*reading.groups["l2"], *reading.groups["decay"])
        wide = losses.detach().cpu().to(torch.float64)
        return Numbers(as_text(self._tape.ids[t])[0], batch, wide, reading.norm, reading.clip, decays)
