"""When training data mattered: the average influence of each step's samples on a query set, per unit of learning rate.

    per_rate_t = (mean over the occurrences z of step t of the influence of z on the queries' mean loss) / η_t

as the paper does, so that a step is not small merely because its rate was. Where the gradient was clipped Σ w J g = 0: scaling all of it
changes nothing, so that the influences of the step's samples add up to 0 however much they mattered. These steps have no `per_rate`;
`size_t`, the mean of |influence| over η_t, has them all. Phases are sought in it: the mean with its sign is a small rest of influences that
cancel, and drowns in its own noise where they are largest. η_t is the largest rate of the step's parameter groups. With momentum or Adam
a step's effect also depends on later rates; dividing by its own is then a convention.
"""

from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
from torch import nn

from ..results import figures
from ..results.influence import Influence
from ..results.result import Result
from ..run.gradients import LossFn
from ..run.run import Run
from ..store import RunStore
from .mean import Options, mean_influence
from .phases import Curve, Phases, phases

CLIPPED = "influences of a clipped step sum to 0 by construction, so per_rate leaves these steps out (`size`, the mean of |influence|, includes them)"
SOUGHT = "phases are detected in mean |influence| per unit of learning rate"
ROWS_AT_ONCE = 1 << 16
CURVES = ("influence", "rate", "per_rate", "size", "loss")


@dataclass(frozen=True, repr=False)
class Timeline(Result):
    """One number of each kind for each step before `at`."""

    influence: Curve  # (T,) mean over the step's occurrences
    rate: Curve  # (T,) η
    per_rate: Curve  # (T,) influence over the rate; NaN where the rate was 0 or the gradient was clipped
    size: Curve  # (T,) mean |influence| of an occurrence over the rate; NaN where the rate was 0
    loss: Curve  # (T,) Σ w ℓ of the step; NaN where losses were not recorded
    phases: Phases  # of `size`
    method: str = field(default="", kw_only=True)  # of the influence
    unit = (
        "influence of one occurrence in units of the queries' mean loss; per_rate: the same per unit of learning rate"
    )
    shown = (*CURVES, "phases", "method")

    @property
    def headline(self) -> str:
        """The model that was queried."""
        return f"Timeline of influence on the model at step {self.at}"

    @property
    def words(self) -> tuple[str, ...]:
        """The phases in one sentence, and where the recording does not rank."""
        weak = () if self.quality is None or self.quality.exact else self.quality.weak
        spans = ", ".join(f"{first:,} to {last - 1:,}" for first, last in weak)
        return self.phases.words, *([f"Not reliably ranked by the recording (grey): steps {spans}."] if weak else [])

    def table(self) -> dict[str, Any]:
        """One line for each step."""
        return {"step": np.arange(self.at), **{k: getattr(self, k) for k in CURVES}}

    def drawings(self) -> dict[str, figures.Figure]:
        """Influence by learning rate with the phases marked; the loss where it is known."""
        each = figures.timeline(self.per_rate, self.size, self.phases.bands(), self.at, figures.strip(self.quality))
        return figures.drawable(timeline=each, loss=figures.loss(self.loss))


def timeline(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    at: int | str = "final",
    *,
    seed: int = 0,
    **options: Unpack[Options],
) -> Timeline:
    """The timeline of influence on the queries' mean loss at `at`; `seed` seeds the noise that phases are tested against."""
    return timeline_of(run, mean_influence(run, model, loss, batch, at, **options), seed=seed)


def timeline_of(run: Run, influence: Influence, *, seed: int = 0) -> Timeline:
    """Like `timeline`, from the influence on one query."""
    influence = influence.only(None).corrected()
    step, table = influence.at, run.steps(0, influence.at)
    _, sums, sizes = influence.by_step()
    mean = sums / np.maximum(1, table.rows)
    rate, clipped = table.groups["rate"].max(1), np.asarray(table.clip) < 1
    per_rate = np.divide(mean, rate, out=np.full(step, np.nan), where=(rate > 0) & ~clipped)
    size = np.divide(sizes, rate, out=np.full(step, np.nan), where=rate > 0)
    pattern = phases(size, samples=table.rows, seed=seed)
    left_out = [f"{clipped.sum()} of {len(clipped)} steps were clipped: {CLIPPED}"] if clipped.any() else []
    caveats = (*influence.caveats, *left_out, SOUGHT)
    curves = mean, rate, per_rate, size, losses(run, step)
    return Timeline(*curves, pattern, method=influence.method, **{**influence.about, "caveats": caveats})


def losses(run: Run, at: int) -> Curve:
    """Σ w ℓ of each step before `at`, NaN where a loss is not known."""
    store = RunStore.open(run.path)
    out, table = np.zeros(at), store.steps(0, at)
    n = int(table.row_start[-1] + table.rows[-1])
    for lo in range(0, n, ROWS_AT_ONCE):
        block = store.read(lo, min(n, lo + ROWS_AT_ONCE), rows=False)
        np.add.at(out, block.step.numpy(), (block.weight * block.loss).numpy())
    return out


def draw_losses(values: Curve) -> dict[str, figures.Figure]:
    """The figure of the loss of each step, where one was recorded."""
    return figures.drawable(loss=figures.loss(values))
