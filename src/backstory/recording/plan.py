r"""Plan a recording: disk space, memory, and how much slower training gets.

With T steps of B samples, and b, s, F, p, r, W, o measured in a short trial (`plan_trial`) of the user's own training,

    store     = b T B + s T + F + checkpoints         bytes of rows and of lines of steps grow with the run, the basis not
    slow-down = (o + W + (T − T_w) r + C) / (T p)     p, r seconds of a plain and of a recorded step, W of T_w warm-up steps,
                                                      C to close all windows, o to open and to close the run
    embedding = 4 m n² + 8 c n bytes                  n numbers in a row, m = 3 matrices with momentum or Adam, else 2, c rows of a chunk
              = 8 N n bytes                           where N, all curvature rows of the run, is at most n/2
    exact     = c T p                                 c multiples of the plain training (`exact.costs`)

Another rank is not tried: of its store differ the vectors of rows, the optimizer's diagonal of steps, and the basis, whose bytes are
known (`docs/reference/format.md`); everything else is the trial's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..capture import find_blocks
from ..capture.modules import Blocks
from ..errors import CoverageError, UsageError
from ..exact.costs import exact_costs
from ..maths.blocked import chunk_rows
from ..maths.encoding import parts, row_bytes
from ..maths.projection import Shape, widen
from ..maths.windows import Grid
from ..replay.recipe import Recipe
from ..results.plan import Plan, PresetPlan
from ..run.compress import OCCURRENCES, RANK
from ..run.sweep import CHUNK_BYTES
from .plan_trial import Progress, Trial, trial
from .recorder import stored_as
from .settings import PRESETS, Settings, settings_of

IN_FLIGHT = 3  # chunks of rows that a sweep holds at a time: one read, one used, one on its way
MOST_RANK = 48  # that is suggested
COMPARED = 2  # rounds in which another preset is tried
NOT_PLANNED = ("path", "resume", "start", "scaler", "recipe", "recipe_args", "loss_reduction", "clip_norm")


def plan(
    recipe: Callable[[], Recipe],
    *,
    steps: int | None = None,
    checkpoints: int | None = None,
    max_bytes: int | None = None,
    settings: Settings | None = None,
    preset: str | None = None,
    outputs: str = "cross-entropy",
    folder: str | Path | None = None,
    seconds: float = 1.0,
    repeats: int = 5,
    compare: bool = False,
    progress: Progress | None = None,
    **short: Any,
) -> Plan:
    """Estimate what recording `steps` steps of a recipe would cost, from a short trial on copies of its model and optimizer.

    `preset`, `settings`, or its fields by name (projection, rank, curvature, encoding and so on), are those of `record`. `steps` defaults
    to the recipe's number of steps. Curvature other than empirical needs `outputs`, the kind of the model's outputs. The trial
    is written to a temporary folder inside `folder` (use the disk that the run will be on), which is always removed. Plain and
    recorded steps alternate in rounds of about `seconds` each: `repeats` of both, after one untimed round. Where steps share curvature a
    round is a whole window, and they may take four times as long together. Seconds are CPU seconds. With `compare`, the presets are tried too.
    """
    if odd := [name for name in short if name in NOT_PLANNED]:
        raise UsageError(f"plan() does not take {odd[0]}=: it comes from the recipe, or the trial does not need it.")
    if repeats < 1 or seconds <= 0:
        raise UsageError(f"repeats must be at least 1 and seconds more than 0, got {repeats=}, {seconds=}.")
    chosen = settings_of(settings, short, preset)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        built = recipe()
        if not isinstance(built, Recipe):
            raise UsageError(f"the recipe must return a backstory.Recipe, got {type(built).__name__}.")
        total = len(built.batches) if steps is None else steps
        if total < 1:
            raise UsageError(f"steps, the planned number of optimizer steps, must be at least 1, got {total}.")
        blocks, refused = _coverage(built, chosen)
        tried = trial(
            built, replace(chosen, uncovered=_tolerant(chosen), warmup_steps=min(total, chosen.warmup_steps)),
            steps=total, folder=folder, outputs=outputs, seconds=seconds, repeats=repeats, progress=progress,
        )  # fmt: skip
        planned = _planned(_Costs(built, tried, total, checkpoints), blocks, refused, max_bytes)
    if not compare:
        return planned
    of_presets = partial(
        plan, recipe, steps=total, checkpoints=checkpoints, outputs=outputs, folder=folder, seconds=seconds,
        repeats=min(COMPARED, repeats), progress=progress, uncovered=_tolerant(chosen),
    )  # fmt: skip
    return replace(planned, presets=tuple(_preset(name, of_presets, planned, chosen) for name in PRESETS))


def _preset(name: str, of_presets: Callable[..., Plan], planned: Plan, chosen: Settings) -> PresetPlan:
    """What a preset would cost; the plan itself where it is that preset's."""
    try:
        p = planned if replace(chosen, uncovered="general") == Settings(**PRESETS[name]) else of_presets(preset=name)
    except UsageError as error:
        return PresetPlan(name, refused=str(error))
    return PresetPlan(name, p.curvature, p.dims, p.store_bytes, p.store_bytes / p.occurrences, p.slowdown)


def _coverage(recipe: Recipe, settings: Settings) -> tuple[Blocks, str | None]:
    """What would be recorded and left out, and what `record` would say if it refuses them."""
    find = partial(find_blocks, recipe.model, recipe.optimizer, rank=None, layers=settings.layers)
    try:
        return find(uncovered=settings.uncovered), None
    except CoverageError as error:
        return find(uncovered="skip"), str(error)


def _tolerant(settings: Settings) -> str:
    """What a trial does with parameters that no rule covers: what the recording will, or, where that refuses, without them."""
    return "skip" if settings.uncovered == "error" else settings.uncovered


def _planned(costs: "_Costs", blocks: Blocks, refused: str | None, max_bytes: int | None) -> Plan:
    t, steps, dims, once = costs.trial, costs.steps, sum(costs.dims), costs.once_seconds()
    config, names = t.settings.as_config(), [field.name for field in fields(Plan)]
    in_all = once + t.learning_seconds + (steps - t.warmup_steps) * costs.step_seconds + costs.windows_seconds
    return Plan(
        **{name: getattr(t, name) for name in Trial._fields if name in names and name != "recorded_seconds"},
        recorded_seconds=costs.recorded_seconds,
        **{name: config[name] for name in ("projection", "rank", "encoding", "curvature")},
        steps=steps,
        occurrences=costs.occurrences,
        dims=dims,
        layers=len(t.shapes),
        left_out=tuple(blocks.left_out),
        general=tuple(blocks.blocks[i].name for names in blocks.general.values() for i in names.values()),
        elsewhere=tuple(blocks.elsewhere),
        refused=refused,
        store_bytes=costs.store_bytes,
        fixed_bytes=round(t.basis_bytes + t.other_bytes),
        window_bytes=costs.window_bytes,
        checkpoint_bytes=costs.checkpoint_bytes,
        compressed_bytes=costs.compressed_bytes(),
        propagator_bytes=costs.propagator_bytes(dims),
        propagator_bytes_per_layer=sum(map(costs.propagator_bytes, costs.dims)),
        rows_bytes=costs.rows_bytes(),
        query_bytes=costs.query_bytes(),
        warmup_seconds=max(0.0, t.learning_seconds - t.warmup_steps * t.plain_seconds),
        once_seconds=once,
        slowdown=in_all / (steps * t.plain_seconds),
        exact_seconds={
            way: {n: multiple * steps * t.plain_seconds for n, multiple in multiples.items()}
            for way, multiples in exact_costs().items()
        },
        max_bytes=max_bytes,
        suggested_rank=None if max_bytes is None else costs.largest_rank(max_bytes),
    )


@dataclass(frozen=True)
class _Costs:
    """The planned run: as many steps as are planned, each as in the trial."""

    recipe: Recipe
    trial: Trial
    steps: int
    checkpoints: int | None

    @property
    def occurrences(self) -> int:
        return max(1, round(self.steps * self.trial.batch))

    @property
    def dims(self) -> list[int]:
        """Numbers of each recorded parameter in a row."""
        return [shape.dims for shape in self.trial.shapes]

    @property
    def checkpoint_bytes(self) -> int:
        """Weights at the end; with checkpoints those and the state of training at the start, the boundaries and the end.

        The optimizer's coordinates at the boundaries come with them (the trial has the end's).
        """
        if self.checkpoints is None:
            return self.trial.model_bytes
        count, each = min(self.checkpoints, max(0, self.steps - 1)), self.trial.model_bytes + self.trial.state_bytes
        return (count + 2) * each + count * self.trial.scale_bytes

    @cached_property
    def store_bytes(self) -> int:
        return self._store(self.trial.row_bytes)

    def _store(self, row_bytes: float) -> int:
        t = self.trial
        grown = row_bytes * self.occurrences + t.step_bytes * self.steps + self.window_bytes
        return round(grown + t.basis_bytes + t.other_bytes + self.checkpoint_bytes)

    @property
    def window_bytes(self) -> int:
        """What windows keep of curvature."""
        if not self._windowed:
            return 0
        return round(self._vector(self.trial.shapes, "learned") * self._window_rows(sum(self.dims)))

    def compressed_bytes(self) -> int | None:
        """The store after `compress` with its defaults; None where there are no curvature rows to compress."""
        t, form = self.trial, self.trial.settings.form
        if not self._own_rows:
            return None
        windows = max(1, self.occurrences // (OCCURRENCES * RANK))
        rank = min(RANK, sum(self.dims), form.rows * self.occurrences // windows)  # rows of curvature of a window
        vector = self._vector(t.shapes, t.settings.projection)
        row = t.row_bytes - vector * (form.rows - form.split) - 16 * form.rows
        wide = self._vector(t.shapes, "learned")  # curvature of a window is no product of factors
        return self._store(row) + wide * round(windows * rank + t.clipped * self.steps)  # and what clipping takes out

    def propagator_bytes(self, dims: int) -> int:
        """What a sweep holds beside the rows it reads: matrices and a chunk's rows, or two numbers for each of a short run's."""
        rows = self.occurrences * max(1, self._own_rows)
        uniform = not self._has_diagonal(self.trial.settings.projection) and _groups_agree(self.recipe.optimizer)
        if uniform and 2 * rows <= dims and not self._windowed:
            return 8 * rows * dims
        matrices = 3 if self.trial.momentum else 2  # A, with momentum C, and what they are made into
        return 4 * matrices * dims**2 + (8 * min(rows, chunk_rows(dims)) * dims if uniform else 0)

    def rows_bytes(self) -> int:
        """What a sweep holds of rows."""
        step = 4 * sum(self.dims) * self.trial.batch * (1 + self._own_rows)
        window = 8 * sum(self.dims) * min(self.trial.settings.window_rank, sum(self.dims)) * self._windowed
        return IN_FLIGHT * round(min(max(CHUNK_BYTES, step), step * self.steps)) + window

    def query_bytes(self) -> int:
        """What a question holds: rows, and each occurrence's score, step and id, which are put together from pieces."""
        return self.rows_bytes() + 8 * sum(self.dims) + (8 + 2 * (8 + 4 * self.trial.letters)) * self.occurrences

    def once_seconds(self) -> float:
        """To open and to close: tables are opened and closed in about the same time, files are joined in proportion."""
        opening, closing = self.trial.opening_seconds, self.trial.closing_seconds
        joining = max(0.0, closing - opening) / self.trial.closed_bytes
        return opening + min(opening, closing) + joining * self.store_bytes

    def largest_rank(self, max_bytes: int) -> int | None:
        """That fits into `max_bytes`, all else as in the trial; None where even rank 1 does not."""
        t = self.trial
        kind = "learned" if t.settings.projection == "full" else t.settings.projection
        beside = self.store_bytes - self._by_rank(t.shapes, t.settings.projection, settled=True)
        low, high = 0, min(MOST_RANK, max(max(s.d_out, s.d_in) for s in t.shapes))
        while low < high:
            middle = (low + high + 1) // 2
            fits = beside + self._by_rank(self._shapes(middle), kind, settled=False) <= max_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low or None

    def _shapes(self, rank: int) -> list[Shape]:
        model, optimizer, settings = self.recipe.model, self.recipe.optimizer, self.trial.settings
        most = settings.most_dims if settings.projection in ("learned", "full") else None
        found = find_blocks(
            model, optimizer, rank=rank, layers=settings.layers, uncovered=settings.uncovered, most=most
        )
        return [block.shape for block in found.blocks]

    def _by_rank(self, shapes: Sequence[Shape], projection: str, *, settled: bool) -> float:
        """The bytes of the store that depend on the rank: vectors of rows, the diagonal of steps, windows, the basis."""
        form, vector = self.trial.settings.form, self._vector(shapes, projection)
        rows = vector * (self._own_rows + (not form.split or self._windowed)) * self.occurrences
        diagonals = 4 * sum(s.dims for s in shapes) * self._has_diagonal(projection) * self.steps
        windows = vector * self._window_rows(sum(s.dims for s in shapes))
        return rows + diagonals + windows + _basis_bytes(shapes, projection, settled)

    @property
    def _windowed(self) -> bool:
        return self.trial.settings.windows

    @property
    def _own_rows(self) -> int:
        """Curvature samples that each occurrence keeps."""
        return 0 if self._windowed else self.trial.settings.form.rows

    def _window_rows(self, dims: int) -> float:
        """Rows of all windows: their directions, and one for each step that was clipped in the optimizer's own coordinates."""
        if not self._windowed:
            return 0.0
        each = self.trial.batch * max(1, self.trial.settings.form.rows)
        return self.grid.rows(0, self.steps, each, dims) + self.trial.clipped * self.steps

    @property
    def grid(self) -> Grid:
        """The windows of the planned run."""
        chosen = self.trial.settings
        return chosen.form.grid(self.trial.batch, self.steps, rank=chosen.window_rank, share=chosen.window_rows)

    @property
    def step_seconds(self) -> float:
        """A step, once the projection is known: on average over those that give rows for curvature and those that do not."""
        if not self._windowed:
            return self.trial.recorded_seconds
        n = self._window_steps
        short = max(min(self.grid.seen, n), min(self.trial.window_steps, n))
        return (short * self.trial.recorded_seconds + (n - short) * self.trial.unseen_seconds) / n

    @property
    def recorded_seconds(self) -> float:
        """The same with a step's share of the closing of its window."""
        return self.step_seconds + (self.trial.window_seconds / self._window_steps if self._windowed else 0.0)

    @property
    def windows_seconds(self) -> float:
        """To close all windows of the run, each in proportion to its rows."""
        if not self._windowed:
            return 0.0
        seen = [min(self.grid.seen, hi - lo) for lo, hi in self.grid.windows(0, self.steps)]
        return self.trial.window_seconds * sum(seen) / min(self.grid.seen, self._window_steps)

    @property
    def _window_steps(self) -> int:
        """Steps of a window after the warm-up."""
        lo, hi = self.grid.window(self.trial.warmup_steps)
        return hi - lo

    def _vector(self, shapes: Sequence[Shape], projection: str) -> int:
        """Bytes of the numbers of one row, and their scales."""
        pairs, factors = zip(shapes, self.trial.single, strict=True), projection != "learned"
        numbers = parts([stored_as(shape, single and factors) or shape.dims for shape, single in pairs])
        return row_bytes(numbers, self.trial.settings.encoding)

    def _has_diagonal(self, projection: str) -> bool:
        """Whether the optimizer's own is kept with each step."""
        return self.trial.adaptive and projection in ("full", "mask")


def _groups_agree(optimizer: Optimizer) -> bool:
    """Whether all groups of parameters have the same numbers, so that steps can be taken several at once."""
    numbers = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]
    return all(group == numbers[0] for group in numbers)


def _basis_bytes(shapes: Sequence[Shape], projection: str, settled: bool) -> float:
    """Of all sides and cores; a side that keeps everything is not kept itself, unless a core chooses among its coordinates.

    Shapes are widened unless they are `settled`, as a warm-up has left them.
    """
    dims, cored = sum(s.dims for s in shapes), any(s.core for s in shapes)
    if projection == "learned" and not settled:
        wide = [widen(s) for s in shapes]
        cored = sum(s.product for s in wide) > dims
        shapes = wide if cored else shapes
    sides = [(d, r) for s in shapes for d, r in ((s.d_out, s.r_out), (s.d_in, s.r_in)) if d and (cored or r < d)]
    if projection == "mask":
        return 8 * sum(r for _, r in sides)
    return 4 * sum(d * r for d, r in sides) + 8 * dims * cored
