r"""Plan a recording: disk space, memory, and how much slower training gets.

With T steps of B samples, and b, s, F, p, r, W, o measured in a short trial (`plan_trial`) of the user's own training,

    store     = b T B + s T + F + checkpoints         bytes of rows and of lines of steps grow with the run, the basis not
    slow-down = (o + W + (T − T_w) r) / (T p)         p, r seconds of a plain and of a recorded step, W of T_w warm-up steps,
                                                      o to open and to close the run
    embedding = 4 m n² + 8 c n bytes                  n numbers in a row, m = 3 matrices with momentum or Adam, else 2, c rows of a chunk
              = 8 N n bytes                           where N, all curvature rows of the run, is at most n/2
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..capture import find_blocks
from ..capture.modules import Blocks, taken_as_frozen
from ..errors import CoverageError, UsageError
from ..replay.recipe import Recipe
from ..run.sweep import CHUNK_BYTES
from .plan_costs import Alternative, Costs
from .plan_trial import Progress, Trial, trial
from .settings import Settings, settings_of

IN_FLIGHT = 3  # chunks of rows that a sweep holds at a time: one read, one used, one on its way
SAME = (
    "batch",
    "energy",
    "coverage",
    "row_bytes",
    "step_bytes",
    "plain_seconds",
    "recorded_seconds",
    "warmup_steps",
)  # as in the trial
NOT_PLANNED = ("path", "resume", "start", "scaler", "recipe", "recipe_args", "loss_reduction", "clip_norm")


@dataclass(frozen=True, kw_only=True)
class Plan(Alternative):
    """What a recording with these settings would cost; bytes and seconds are plain numbers, `str(plan)` has them with units."""

    steps: int
    batch: float  # occurrences of a step
    occurrences: int
    energy: float | None  # share of the energy of the trial's warm-up that a row holds, where the rank is "auto:…"
    layers: int  # recorded parameters
    coverage: float  # share of the squared gradient norm that is recorded, 0 to 1
    left_out: tuple[str, ...]  # trained parameters that would not be recorded
    elsewhere: tuple[str, ...]  # parameters in no group of the optimizer
    refused: str | None  # why `record` would refuse the model, and what to do
    row_bytes: float  # of one occurrence, its curvature rows included
    step_bytes: float  # of one step beside its rows
    fixed_bytes: int  # basis and config
    checkpoint_bytes: int  # all checkpoints
    compressed_bytes: int | None  # after `compress` with its defaults, where there are curvature rows
    propagator_bytes_per_layer: int  # of all layers, each with a propagator of its own
    rows_bytes: int  # of a sweep that embeds or asks, read and on their way
    query_bytes: int  # one question, by the adjoint
    plain_seconds: float  # a step
    recorded_seconds: float  # a step, once the projection is known
    warmup_steps: int
    warmup_seconds: float  # once, beyond what these steps take anyway
    once_seconds: float  # to open the run and to close it
    slowdown: float  # of the whole run
    trial_steps: int
    max_bytes: int | None
    suggested_rank: int | None  # the largest that fits into max_bytes with the other settings as they are
    alternatives: tuple[Alternative, ...]  # the planned settings first

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """A short report; every number with its unit."""
        return "\n".join(_lines(self))


def plan(
    recipe: Callable[[], Recipe],
    *,
    steps: int | None = None,
    checkpoints: int | None = None,
    max_bytes: int | None = None,
    settings: Settings | None = None,
    outputs: str = "cross-entropy",
    folder: str | Path | None = None,
    seconds: float = 1.0,
    repeats: int = 5,
    progress: Progress | None = None,
    **short: Any,
) -> Plan:
    """Estimate what recording `steps` steps of a recipe would cost, from a short trial on copies of its model and optimizer.

    `settings`, or its fields by name (projection, rank, curvature, encoding and so on), are those of `record`. `steps` defaults
    to the recipe's number of steps. Curvature other than empirical needs `outputs`, the kind of the model's outputs. The trial
    is written to a temporary folder inside `folder` (use the disk that the run will be on), which is always removed. Plain and
    recorded steps alternate in rounds of about `seconds` each: `repeats` of both, after one untimed round.
    """
    if odd := [name for name in short if name in NOT_PLANNED]:
        raise UsageError(f"plan() does not take {odd[0]}=: it comes from the recipe, or the trial does not need it.")
    if repeats < 1 or seconds <= 0:
        raise UsageError(
            f"repeats must be at least 1 and seconds more than 0, got repeats={repeats}, seconds={seconds}."
        )
    chosen = settings_of(settings, short)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        built = _build(recipe)
        total = len(built.batches) if steps is None else steps
        if total < 1:
            raise UsageError(f"steps, the planned number of optimizer steps, must be at least 1, got {total}.")
        blocks, refused = _coverage(built, chosen)
        tried = trial(
            built, folder=folder, outputs=outputs, seconds=seconds, repeats=repeats, progress=progress,
            settings=replace(chosen, uncovered="skip", warmup_steps=min(total, chosen.warmup_steps)),
        )  # fmt: skip
        costs = Costs(built, tried, steps=total, checkpoints=checkpoints, max_bytes=max_bytes)
        return _planned(total, tried, costs, blocks, refused)


def _build(recipe: Callable[[], Recipe]) -> Recipe:
    built = recipe()
    if not isinstance(built, Recipe):
        raise UsageError(f"the recipe must return a backstory.Recipe, got {type(built).__name__}.")
    return built


def _coverage(recipe: Recipe, settings: Settings) -> tuple[Blocks, str | None]:
    """What would be recorded and left out, and what `record` would say if it refuses them."""
    find = partial(find_blocks, recipe.model, recipe.optimizer, rank=None, layers=settings.layers)
    try:
        return find(uncovered=settings.uncovered), None
    except CoverageError as error:
        return find(uncovered="skip"), str(error)


def _planned(steps: int, t: Trial, costs: Costs, blocks: Blocks, refused: str | None) -> Plan:
    chosen, *_ = alternatives = costs.alternatives()
    form, dims = t.settings.form, sum(t.dims)
    step = 4 * dims * t.batch * (1 + form.rows)
    sweep_bytes = IN_FLIGHT * round(min(max(CHUNK_BYTES, step), step * steps))
    each = 8 + 2 * (8 + 4 * t.letters)  # an occurrence's score, its step and its id, which are put together from pieces
    once = _once_seconds(t, chosen.store_bytes)
    in_all = once + t.warmup_seconds + (steps - t.warmup_steps) * t.recorded_seconds
    return Plan(
        **vars(chosen),
        **{name: getattr(t, name) for name in SAME},
        steps=steps,
        occurrences=costs.occurrences,
        layers=len(t.shapes),
        left_out=tuple(blocks.left_out),
        elsewhere=tuple(blocks.elsewhere),
        refused=refused,
        fixed_bytes=round(t.basis_bytes + t.other_bytes),
        checkpoint_bytes=costs.checkpoint_bytes,
        compressed_bytes=costs.compressed_bytes(),
        propagator_bytes_per_layer=sum(costs.propagator_bytes(p, t.settings) for p in t.dims),
        rows_bytes=sweep_bytes,
        query_bytes=round(sweep_bytes + 8 * dims + each * costs.occurrences),
        warmup_seconds=max(0.0, t.warmup_seconds - t.warmup_steps * t.plain_seconds),
        once_seconds=once,
        slowdown=in_all / (steps * t.plain_seconds),
        trial_steps=t.steps,
        max_bytes=costs.max_bytes,
        suggested_rank=costs.suggested_rank(),
        alternatives=tuple(alternatives),
    )


def _once_seconds(t: Trial, store_bytes: int) -> float:
    """To open and to close: tables are opened and closed in about the same time, files are joined in proportion."""
    joining = max(0.0, t.closing_seconds - t.opening_seconds) / t.store_bytes
    return t.opening_seconds + min(t.opening_seconds, t.closing_seconds) + joining * store_bytes


def _lines(p: Plan) -> Iterator[str]:
    """The report, line by line."""
    grown = p.row_bytes * p.occurrences, p.step_bytes * p.steps
    yield (
        f"{p.steps:,} steps of {p.batch:,.4g} samples, {p.occurrences:,} occurrences; {p.projection} projection, rank "
        f"{_rank(p.rank)}, {p.encoding}, curvature {p.curvature}: {p.dims:,} dimensions, {p.layers} parameters"
    )
    if p.energy is not None:
        yield (
            f"rank          chosen in the trial: {p.dims:,} dimensions retain {p.energy:.1%} of the gradient energy "
            f"of its first {p.warmup_steps} steps; other batches or a warm-up schedule may give another rank"
        )
    yield f"disk          {_size(p.store_bytes)}, {p.bytes_per_occurrence:,.0f} bytes per occurrence"
    yield (
        f"  grows       gradients {_size(grown[0])} ({p.row_bytes:,.0f} bytes per occurrence), steps "
        f"{_size(grown[1])} ({p.step_bytes:,.0f} bytes each)"
    )
    yield f"  fixed       projection and config {_size(p.fixed_bytes)}, checkpoints {_size(p.checkpoint_bytes)}"
    if p.compressed_bytes is not None and p.compressed_bytes < p.store_bytes:
        yield (
            f"  compressed  {_size(p.compressed_bytes)} after `backstory compress` "
            f"({p.compressed_bytes / p.occurrences:,.0f} bytes per occurrence)"
        )
    yield (
        f"embedding     about {_size(p.propagator_bytes)} of memory jointly, {_size(p.propagator_bytes_per_layer)} "
        f"per layer, plus up to {_size(2 * p.rows_bytes)} for gradients and embeddings in flight"
    )
    yield f"query         about {_size(p.query_bytes)} of memory"
    yield (
        f"slowdown      {p.slowdown:.2f} × over the whole run: a step takes {_time(p.recorded_seconds)} instead of "
        f"{_time(p.plain_seconds)} ({p.recorded_seconds / p.plain_seconds:.2f} ×)"
    )
    yield from _once(p)
    yield (
        f"recorded      {p.coverage:.1%} of the gradient (squared norm); left out: {', '.join(p.left_out) or 'nothing'}"
    )
    if p.elsewhere:
        yield f"              {taken_as_frozen(p.elsewhere)}"
    if p.refused is not None:
        yield f"refused       record() would raise: {p.refused}"
    yield from _budget(p)
    yield from _table(p)


def _once(p: Plan) -> Iterator[str]:
    """What does not come again at every step."""
    learning = (
        f"{_time(p.warmup_seconds)} to learn the projection in the first {p.warmup_steps} steps, "
        if p.warmup_steps
        else ""
    )
    share = _time((p.warmup_seconds + p.once_seconds) / p.steps)
    yield (
        f"  one-off     {learning}{_time(p.once_seconds)} to open and close the run ({share} per step over the whole "
        "run)"
    )


def _budget(p: Plan) -> Iterator[str]:
    if p.max_bytes is None:
        return
    verdict = "fits into" if p.store_bytes <= p.max_bytes else "does not fit into"
    rank = "no rank fits" if p.suggested_rank is None else f"the largest rank that fits is {p.suggested_rank}"
    yield f"budget        {verdict} {_size(p.max_bytes)}; {rank}"


def _table(p: Plan) -> Iterator[str]:
    head = ("projection", "rank", "encoding", "curvature", "dimensions", "bytes per occurrence", "disk", "embedding")
    rows = [
        (
            a.projection,
            _rank(a.rank),
            a.encoding,
            a.curvature,
            f"{a.dims:,}",
            f"{a.bytes_per_occurrence:,.0f}",
            _size(a.store_bytes) + (" too large" if a.fits is False else ""),
            _size(a.propagator_bytes),
        )
        for a in p.alternatives
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    yield ""
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _rank(rank: Any) -> str:
    """16, 32 × 16, or patterns."""
    if isinstance(rank, dict):
        return ", ".join(f"{name}: {_rank(r)}" for name, r in rank.items())
    return " × ".join(map(str, rank)) if isinstance(rank, list) else str(rank)


def _size(count: float) -> str:
    power = min(4, int(math.log(max(count, 1), 1000)))
    return f"{_short(count / 1000**power)} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _time(seconds: float) -> str:
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(1e3 * seconds)} ms"


def _short(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
