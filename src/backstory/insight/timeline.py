"""When training data mattered: the average influence of each step's samples on a query set, by learning rate.

    per_rate_t = (mean over the occurrences z of step t of the influence of z on the queries' mean loss) / η_t

as the paper does, so that a step is not small merely because its rate was. Where the gradient was clipped Σ w J g = 0: scaling all of it
changes nothing, so that the influences of the step's samples add up to 0 however much they mattered. These steps have no `per_rate`;
`size_t`, the mean of |influence| over η_t, has them all. Phases are sought in it: the mean with its sign is a small rest of influences that
cancel, and drowns in its own noise where they are largest. η_t is the largest rate of the step's parameter groups. With momentum or Adam
a step's effect also depends on later rates; dividing by its own is then a convention.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..run.embed import Asked, Progress
from ..run.gradients import LossFn
from ..run.run import Run
from ..store import RunStore
from . import plots
from .asking import SIGN, mean_answer, said
from .notebook import InNotebook
from .phases import Phases, phases
from .shapes import Curve

UNIT = "influence of one occurrence in units of the queries' mean loss; per_rate: the same per unit of learning rate"
SOUGHT = "phases are sought in the mean size of influences by learning rate, whatever their sign"
ROWS_AT_ONCE = 1 << 16
CURVES = ("influence", "rate", "per_rate", "size", "loss")


@dataclass(frozen=True)
class Timeline(InNotebook):
    """One number of each kind for each step before `at`."""

    at: int
    influence: Curve  # (T,) mean over the step's occurrences
    rate: Curve  # (T,) η
    per_rate: Curve  # (T,) influence over the rate; NaN where the rate was 0 or the gradient was clipped
    size: Curve  # (T,) mean |influence| of an occurrence over the rate; NaN where the rate was 0
    loss: Curve  # (T,) Σ w ℓ of the step; NaN where losses were not recorded
    phases: Phases  # of `size`
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        curves = {k: getattr(self, k).tolist() for k in CURVES}
        return {
            "at": self.at,
            **curves,
            "phases": self.phases.as_dict(),
            "notes": list(self.notes),
            "sign": SIGN,
            "unit": UNIT,
        }

    def figure(self) -> Any:
        """Influence by learning rate above, the loss below where it is known, the phases marked."""
        losses = bool(np.isfinite(self.loss).any())
        titles = ("Mean influence of one occurrence, by learning rate", *(["Training loss"] if losses else []))
        names = ("loss units per unit of rate", *(["loss"] if losses else []))
        drawn = plots.figure(titles, "training step", names)
        _line(drawn, self.per_rate, "each step", 0, opacity=0.35)
        _line(drawn, smooth(self.per_rate), "smoothed", 0)
        _line(drawn, smooth(self.size), "mean size, smoothed", 1)
        for window in self.phases.windows:
            drawn.add_vrect(
                x0=window.first,
                x1=window.last,
                annotation_text=window.name,
                opacity=0.08,
                fillcolor=plots.COLOURS[4],
                row=1,
                col=1,
            )
        if losses:
            _line(drawn, self.loss, "training loss", 6, row=2)
        return drawn

    @property
    def headline(self) -> str:
        """The phases in one sentence."""
        return f"Timeline of influence on the model at step {self.at}. Phases: {self.phases.words}"

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each step."""
        curves = {k: getattr(self, k) for k in CURVES}
        return plots.frame({"step": np.arange(self.at), **curves})


def timeline(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    at: int | str = "final",
    *,
    per_layer: bool = False,
    contraction: Asked = "auto",
    seed: int = 0,
    unverified: bool = False,
    progress: Progress | None = None,
) -> Timeline:
    """The timeline of influence on the queries' mean loss at `at`; `seed` of the noise that phases are compared with."""
    answer = mean_answer(
        run,
        model,
        loss,
        batch,
        at,
        per_layer=per_layer,
        contraction=contraction,
        unverified=unverified,
        progress=progress,
    )
    step = answer.at
    scores, table = answer.scores[0].numpy(), run.store.steps(0, step)
    mean, sizes = by_step(scores, answer.steps, step), by_step(np.abs(scores), answer.steps, step)
    rate, clipped = table.groups["rate"].max(1), np.asarray(table.clip) < 1
    per_rate = np.divide(mean, rate, out=np.full(step, np.nan), where=(rate > 0) & ~clipped)
    size = np.divide(sizes, rate, out=np.full(step, np.nan), where=rate > 0)
    found = phases(size, samples=table.rows, seed=seed)
    notes = (*said(answer), *_about_clipping(clipped), SOUGHT)
    return Timeline(step, mean, rate, per_rate, size, losses(run.store, step), found, notes)


def _about_clipping(clipped: Any) -> tuple[str, ...]:
    if not clipped.any():
        return ()
    said = "their samples' influences add up to 0 by construction and are left out of per_rate, not of size"
    return (f"{clipped.sum()} of {len(clipped)} steps were clipped: {said}",)


def _line(drawn: Any, y: Curve, name: str, colour: int, row: int = 1, opacity: float = 1.0) -> None:
    line = {"color": plots.COLOURS[colour]}
    drawn.add_scatter(y=y.tolist(), mode="lines", name=name, opacity=opacity, line=line, row=row, col=1)


def by_step(values: Curve, steps: Any, n: int) -> Curve:
    """Mean of the values of each step, (n,)."""
    return np.bincount(steps, weights=values, minlength=n) / np.maximum(1, np.bincount(steps, minlength=n))


def losses(store: RunStore, at: int) -> Curve:
    """Σ w ℓ of each step before `at`, NaN where a loss is not known."""
    out, table = np.zeros(at), store.steps(0, at)
    n = int(table.row_start[-1] + table.rows[-1])
    for lo in range(0, n, ROWS_AT_ONCE):
        block = store.read(lo, min(n, lo + ROWS_AT_ONCE), rows=False)
        np.add.at(out, block.step.numpy(), (block.weight * block.loss).numpy())
    return out


def smooth(y: Curve, share: float = 0.02) -> Curve:
    """Mean over the neighbours within `share` of the curve on either side; what is not a number is left out."""
    half = min(max(1, round(share * len(y))), (len(y) - 1) // 2)
    known = np.isfinite(y)
    window = np.ones(2 * half + 1)
    total = np.convolve(np.where(known, y, 0.0), window, "same")
    count = np.convolve(known.astype(float), window, "same")
    out: Curve = np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0)
    return out
