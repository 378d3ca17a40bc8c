r"""What settings other than the trial's would cost: computed from the trial, not measured.

Rows of other settings differ from the trial's by their vectors, whose bytes are known (`docs/format.md`):

    row   = (R + 1) (p c + 4 L) + 16 R        c bytes a number, L scales of 4 bytes where the encoding has them,
                                              R curvature rows; (R + 1) → R where the gradient is their sum
    step  = 4 p                               only where Adam's diagonal is kept
    basis = 4 Σ (d_out r_out + d_in r_in + r_out r_in kept)

What the trial had beyond these formulas is added for all; the basis, whose core is shared out unevenly, in proportion.
Where the warm-up decides the rank, the trial's has decided it.
Shapes:  p numbers in a row, L recorded parameters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ..capture import find_blocks
from ..maths.blocked import chunk_rows
from ..maths.encoding import parts, row_bytes
from ..maths.projection import Shape, widen
from ..replay.recipe import Recipe
from ..run.compress import OCCURRENCES, RANK
from .plan_trial import Trial
from .recorder import stored_as
from .settings import SEQUENCE_CURVATURE, Empirical, Sampled, Settings

RANKS = (8, 16, 32)  # of the alternatives
MOST_RANK = 48  # that is suggested: learning a projection holds 9 r² × 9 r² numbers, 1.7 GB at 48


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Settings, and what they would cost."""

    projection: str
    rank: Any  # a number, a pair, or either by name pattern; without meaning for "full"
    encoding: str
    curvature: str
    dims: int  # numbers in a row
    bytes_per_occurrence: float  # everything in the store, shared out among the occurrences
    store_bytes: int
    propagator_bytes: int  # joint
    fits: bool | None  # into max_bytes, where it was given


class _Bytes(NamedTuple):
    row: float  # of an occurrence
    step: float
    basis: float


class Costs:
    """The planned run, with the settings of the trial or with others."""

    def __init__(
        self,
        recipe: Recipe,
        tried: Trial,
        *,
        steps: int,
        checkpoints: int | None,
        max_bytes: int | None,
    ) -> None:
        self._recipe, self._trial = recipe, tried
        self._steps, self.max_bytes = steps, max_bytes
        self.occurrences = max(1, round(steps * tried.batch))
        self.matrices = 3 if tried.momentum else 2  # A, with momentum C, and what they are made into
        self.checkpoint_bytes = _checkpoint_bytes(tried, steps, checkpoints)
        self._at_trial = self._formula(tried.settings)

    def of(self, settings: Settings) -> Alternative:
        """What these settings would cost."""
        t, known, at_trial = self._trial, self._formula(settings), self._at_trial
        row = t.row_bytes + known.row - at_trial.row
        step = t.step_bytes + known.step - at_trial.step
        same_kind = settings.projection == t.settings.projection and at_trial.basis > 0
        basis = known.basis * (t.basis_bytes / at_trial.basis if same_kind else 1.0)
        store = row * self.occurrences + step * self._steps + basis + t.other_bytes + self.checkpoint_bytes
        dims = sum(shape.dims for shape in self._shapes(settings))
        return Alternative(
            projection=settings.projection,
            rank=settings.as_config()["rank"],
            encoding=settings.encoding,
            curvature=str(settings.curvature),
            dims=dims,
            bytes_per_occurrence=store / self.occurrences,
            store_bytes=round(store),
            propagator_bytes=self.propagator_bytes(dims, settings),
            fits=None if self.max_bytes is None else store <= self.max_bytes,
        )

    def propagator_bytes(self, dims: int, settings: Settings) -> int:
        """What a sweep holds beside the rows it reads: matrices and a chunk's rows, or two numbers for each of a short run's."""
        rows = self.occurrences * max(1, settings.form.rows)
        own_diagonal = self._trial.adaptive and settings.projection in ("full", "mask")
        uniform = not own_diagonal and _groups_agree(self._recipe.optimizer)
        if uniform and 2 * rows <= dims:
            return 8 * rows * dims
        return 4 * self.matrices * dims**2 + (8 * min(rows, chunk_rows(dims)) * dims if uniform else 0)

    def compressed_bytes(self) -> int | None:
        """The store after `compress` with its defaults; None where there are no curvature rows to compress."""
        t, form = self._trial, self._trial.settings.form
        if not form.rows:
            return None
        windows = max(1, self.occurrences // (OCCURRENCES * RANK))
        rank = min(RANK, sum(t.dims), form.rows * self.occurrences // windows)  # rows of curvature of a window
        row = t.row_bytes - self._at_trial.row + self._vector(t.settings)
        wide = self._vector(t.settings, factors=False)  # curvature of a window is no product of factors
        curved = wide * (windows * rank + t.clipped * self._steps)  # and what clipping takes out of its steps
        grown = row * self.occurrences + t.step_bytes * self._steps + curved
        return round(grown + t.basis_bytes + t.other_bytes + self.checkpoint_bytes)

    def alternatives(self) -> list[Alternative]:
        """A few, the settings of the trial first."""
        different: list[Settings] = []
        for settings in self._others(self._trial.settings):
            if settings not in different:
                different.append(settings)
        return [self.of(settings) for settings in different]

    def suggested_rank(self) -> int | None:
        """The largest rank that fits into max_bytes, all else as in the trial; None where even rank 1 does not."""
        if self.max_bytes is None:
            return None
        chosen = _ranked(self._trial.settings)
        low, high = 0, min(MOST_RANK, max(max(s.d_out, s.d_in) for s in self._shapes(chosen)))
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.of(replace(chosen, rank=middle)).store_bytes <= self.max_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low or None

    def _others(self, chosen: Settings) -> Iterator[Settings]:
        yield chosen
        for rank in RANKS:
            for encoding in ("float16", "int8"):
                yield replace(_ranked(chosen), rank=rank, encoding=encoding)
        sequences = self._recipe.loss_reduction == "token-mean"
        other = Empirical() if chosen.form.rows else SEQUENCE_CURVATURE if sequences else Sampled()
        yield replace(chosen, curvature=other)
        numbered = chosen if chosen.auto_rank is None else replace(chosen, rank=Settings.rank)
        yield replace(numbered, projection="random" if chosen.projection == "learned" else "learned")

    def _shapes(self, settings: Settings) -> list[Shape]:
        if settings.auto_rank is not None:
            return self._trial.shapes
        model, optimizer = self._recipe.model, self._recipe.optimizer
        blocks = find_blocks(model, optimizer, rank=settings.widths(), layers=settings.layers, uncovered="skip")
        return [block.shape for block in blocks.blocks]

    def _vector(self, settings: Settings, *, factors: bool = True) -> int:
        """Bytes of the numbers of one row, and their scales."""
        pairs = zip(self._shapes(settings), self._trial.single, strict=True)
        single = factors and settings.projection != "learned"
        numbers = parts([stored_as(shape, is_single and single) or shape.dims for shape, is_single in pairs])
        return row_bytes(numbers, settings.encoding)

    def _formula(self, settings: Settings) -> _Bytes:
        shapes, form = self._shapes(settings), settings.form
        dims, vector = sum(shape.dims for shape in shapes), self._vector(settings)
        diagonal = self._trial.adaptive and settings.projection in ("full", "mask")
        row = vector * (form.rows + (not form.split)) + 16 * form.rows
        return _Bytes(row, 4 * dims * diagonal, _basis_bytes(settings.projection, shapes))


def _groups_agree(optimizer: Optimizer) -> bool:
    """Whether all groups of parameters have the same numbers, so that steps can be taken several at once."""
    names = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "betas")
    return len({str([group.get(name) for name in names]) for group in optimizer.param_groups}) <= 1


def _ranked(settings: Settings) -> Settings:
    """The same in a projection that has a rank."""
    return replace(settings, projection="learned") if settings.projection == "full" else settings


def _basis_bytes(kind: str, shapes: list[Shape]) -> int:
    """The numbers of all sides and cores; a side that keeps everything is not kept itself."""
    if kind == "full":
        return 0
    if kind == "mask":
        return 8 * sum(r for s in shapes for _, r in _sides(s))
    if any(s.core for s in shapes):  # as a warm-up has left them
        return 4 * sum(s.product * s.core + sum(d * r for d, r in _sides(s)) for s in shapes)
    wide = [widen(s) for s in shapes] if kind == "learned" else shapes
    cored = sum(s.dims for s in wide) > sum(s.dims for s in shapes)
    sides = 4 * sum(d * r for s in wide for d, r in _sides(s))
    return sides + (_core_bytes(wide, sum(s.dims for s in shapes)) if cored else 0)


def _sides(s: Shape) -> list[tuple[int, int]]:
    """(d, r) of the sides that are kept."""
    return [(d, r) for d, r in ((s.d_out, s.r_out), (s.d_in, s.r_in)) if r < d]


def _core_bytes(wide: list[Shape], budget: int) -> int:
    """Coordinates go where the rows' energy is, which is not known yet: taken as shared out by the widths of the products."""
    return round(4 * budget * sum(s.product**2 for s in wide) / sum(s.product for s in wide))


def _checkpoint_bytes(tried: Trial, steps: int, checkpoints: int | None) -> int:
    """Weights at the start, the boundaries and the end; Adam's coordinates at the boundaries (the trial has the end's)."""
    if checkpoints is None:
        return 0
    count = min(checkpoints, max(0, steps - 1))
    return (count + 2) * tried.model_bytes + count * tried.scale_bytes
