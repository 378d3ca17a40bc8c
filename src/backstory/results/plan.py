"""What a recording would cost, and that in words with units."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..capture.modules import taken_as_frozen
from .words import describe_duration


@dataclass(frozen=True)
class PresetPlan:
    """What recording with one preset would cost."""

    name: str
    curvature: str = ""
    dims: int = 0
    store_bytes: int = 0
    bytes_per_occurrence: float = 0.0
    slowdown: float = 0.0
    refused: str = ""  # why it cannot be recorded so

    def __str__(self) -> str:
        """One line of the report."""
        if self.refused:
            return f"not possible: {self.refused}"
        return (
            f"{self.slowdown:.2f} × over the whole run, {_size(self.store_bytes)} on disk ({self.bytes_per_occurrence:,.0f} bytes per "
            f"occurrence): curvature {self.curvature}, {self.dims:,} dimensions"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recording with these settings would cost; bytes and seconds are plain numbers, `str(plan)` has them with units."""

    projection: str
    rank: Any  # a number, a pair, either by name pattern, or "auto:…"; without meaning for "full"
    encoding: str
    curvature: str
    steps: int
    batch: float  # occurrences of a step
    occurrences: int
    dims: int  # numbers in a row
    layers: int  # recorded parameters
    energy: float | None  # share of the energy of the trial's warm-up that a row holds, where the rank is "auto:…"
    coverage: float  # share of the squared gradient norm that is recorded, 0 to 1
    left_out: tuple[str, ...]  # trained parameters that would not be recorded
    general: tuple[str, ...]  # parameters without a layer rule, for which the calls of their modules are repeated
    elsewhere: tuple[str, ...]  # parameters in no group of the optimizer
    refused: str | None  # why `record` would refuse the model, and what to do
    store_bytes: int
    row_bytes: float  # of one occurrence, its curvature rows included
    step_bytes: float  # of one step beside its rows
    fixed_bytes: int  # basis and config
    window_bytes: int  # curvature that the steps of windows share
    checkpoint_bytes: int  # all checkpoints
    compressed_bytes: int | None  # after `compress` with its defaults, where there are curvature rows
    propagator_bytes: int  # joint
    propagator_bytes_per_layer: int  # of all layers, each with a propagator of its own
    rows_bytes: int  # of a sweep that embeds or asks, read and on their way
    query_bytes: int  # one question, by the adjoint
    plain_seconds: float  # a step
    recorded_seconds: float  # a step, once the projection is known
    warmup_steps: int
    warmup_seconds: float  # once, beyond what these steps take anyway
    once_seconds: float  # to open the run and to close it
    slowdown: float  # of the whole run
    exact_seconds: dict[str, dict[int, float]]  # "reverse": by queries; "leave_out", "tangent": by groups
    max_bytes: int | None
    suggested_rank: int | None  # the largest that fits into max_bytes with the other settings as they are
    presets: tuple[PresetPlan, ...] = ()  # where they are compared

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """A short report; every number with its unit."""
        return "\n".join(_lines(self))


def _lines(p: Plan) -> Iterator[str]:
    yield (
        f"{p.steps:,} steps of {p.batch:,.4g} samples, {p.occurrences:,} occurrences; {p.projection} projection, "
        f"rank {_rank(p.rank)}, {p.encoding}, curvature {p.curvature}: {p.dims:,} dimensions, {p.layers} parameters"
    )
    if p.energy is not None:
        yield (
            f"rank          chosen in the trial: {p.dims:,} dimensions retain {p.energy:.1%} of the gradient energy of its first "
            f"{p.warmup_steps} steps; other batches or a warm-up schedule may give another rank"
        )
    yield f"disk          {_size(p.store_bytes)}, {p.store_bytes / p.occurrences:,.0f} bytes per occurrence"
    yield (
        f"  grows       gradients {_size(p.row_bytes * p.occurrences)} ({p.row_bytes:,.0f} bytes per occurrence), "
        f"steps {_size(p.step_bytes * p.steps)} ({p.step_bytes:,.0f} bytes each)"
    )
    windows = f"curvature of windows {_size(p.window_bytes)}, " if p.window_bytes else ""
    yield f"  fixed       {windows}projection and config {_size(p.fixed_bytes)}, checkpoints {_size(p.checkpoint_bytes)}"
    if p.compressed_bytes is not None and p.compressed_bytes < p.store_bytes:
        yield (
            f"  compressed  {_size(p.compressed_bytes)} after `backstory compress` "
            f"({p.compressed_bytes / p.occurrences:,.0f} bytes per occurrence)"
        )
    yield (
        f"embedding     about {_size(p.propagator_bytes)} of memory jointly, {_size(p.propagator_bytes_per_layer)} per layer, "
        f"plus up to {_size(2 * p.rows_bytes)} for gradients and embeddings in flight"
    )
    yield f"query         about {_size(p.query_bytes)} of memory"
    yield (
        f"slowdown      {p.slowdown:.2f} × over the whole run: a step takes {_time(p.recorded_seconds)} instead of "
        f"{_time(p.plain_seconds)} ({p.recorded_seconds / p.plain_seconds:.2f} ×)"
    )
    warmup = f"{_time(p.warmup_seconds)} to learn the projection in the first {p.warmup_steps} steps, "
    share = _time((p.warmup_seconds + p.once_seconds) / p.steps)
    yield (
        f"  one-off     {warmup if p.warmup_steps else ''}{_time(p.once_seconds)} to open and close the run "
        f"({share} per step over the whole run)"
    )
    yield from _exact_lines(p)
    yield f"recorded      {p.coverage:.1%} of the gradient (squared norm); left out: {', '.join(p.left_out) or 'nothing'}"
    if p.general:
        yield f"general rule  {', '.join(p.general)}: no layer rule; their modules are called again for each sample"
    if p.elsewhere:
        yield f"              {taken_as_frozen(p.elsewhere)}"
    if p.refused is not None:
        yield f"refused       record() would raise: {p.refused}"
    if p.max_bytes is not None:
        verdict = "fits into" if p.store_bytes <= p.max_bytes else "does not fit into"
        rank = "no rank fits" if p.suggested_rank is None else f"the largest rank that fits is {p.suggested_rank}"
        yield f"budget        {verdict} {_size(p.max_bytes)}; {rank}"
    if p.presets:
        yield f"presets       {WHERE_QUALITY}"
        for preset in p.presets:
            yield f"  {preset.name:<12}{preset}"


WHERE_QUALITY = "what each reached on measured models is in docs/how-to/settings.md; measure your own run with `backstory calibrate`"
WAYS = {
    "reverse": ("query", "queries", "influence of every use on so many queries (a reverse sweep)"),
    "leave_out": ("group", "groups", "training again without each group"),
    "tangent": ("group", "groups", "first-order effect of each group on any query (tangents)"),
}


def _exact_lines(p: Plan) -> Iterator[str]:
    """What exact results would cost later, by replaying the training."""
    for k, (way, times) in enumerate(p.exact_seconds.items()):
        one, many, what = WAYS[way]
        costs = ", ".join(f"{n} {one if n == 1 else many} about {describe_duration(x)}" for n, x in times.items())
        yield f"{'' if k else 'exact':<14}{costs}: {what}"


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
