"""How the influence of groups of samples grows and fades from checkpoint to checkpoint (the paper's saturation figure).

At each stored checkpoint c, the queries' mean loss is evaluated on the model at c, and the influence on it of all occurrences before c is averaged
over the samples of each group that were used by then. Exact where an exact result of c is stored; else from segments where the run is
embedded in them (`run.embed(segments=K)`), or by one reverse sweep for each checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from torch import nn

from ..capture.model_state import restored_weights
from ..errors import UsageError
from ..results import figures
from ..results.influence import Influence
from ..results.origin import is_exact
from ..results.result import Result
from ..results.words import describe_change
from ..run.gradients import LossFn
from ..run.groups import OTHERS, By, grouped, is_time
from ..run.run import Run
from .mean import Options, about_all, mean_influence
from .phases import Curve


@dataclass(frozen=True, repr=False)
class Evolution(Result):
    """Mean influence of each group on the model at each checkpoint."""

    checkpoints: tuple[int, ...]
    groups: tuple[str, ...]
    mean: Curve  # (G, C); NaN where no sample of the group had been used
    samples: Curve  # (G, C) how many samples the mean is over
    method: tuple[
        str, ...
    ]  # of each checkpoint: "exact unrolling", "segments", "embeddings" or "adjoint" (a reverse sweep)
    unit = "mean influence per sample of the group (its occurrences so far summed), in units of the queries' mean loss"
    shown = ("checkpoints", "mean", "samples", "method")

    @property
    def headline(self) -> str:
        """What the numbers are."""
        return "Mean influence per sample, from its uses so far, on the model at each checkpoint"

    @property
    def words(self) -> tuple[str, ...]:
        """How each group's influence changed; what holds for several is said once, and a single group needs no name."""
        named = {g: self.describe(g) for g in self.groups if g != OTHERS}
        alike = {text: [g for g in named if named[g] == text] for text in named.values()}
        if len(named) == 1:
            return tuple(alike)
        each = {text: ", ".join(g) + (" (each)" if len(g) > 1 else "") for text, g in alike.items()}
        return tuple(f"{groups if len(alike) > 1 else 'Each group'}: {text}" for text, groups in each.items())

    def describe(self, group: str) -> str:
        """How the influence of one group changed, in a sentence."""
        return describe_change(figures.numbers(self.mean[self.groups.index(group)].tolist()))

    def only(self, *groups: str) -> "Evolution":
        """Some of the groups alone."""
        rows = [self.groups.index(g) for g in groups]
        return replace(self, groups=groups, mean=self.mean[rows], samples=self.samples[rows])

    def numbers(self) -> dict[str, Any]:
        """The means, and over how many samples they are, by group."""
        by_group = {k: dict(zip(self.groups, getattr(self, k), strict=True)) for k in ("mean", "samples")}
        return {**super().numbers(), **by_group}

    def table(self) -> dict[str, Any]:
        """One line for each group and checkpoint."""
        groups, checkpoints = np.repeat(self.groups, len(self.checkpoints)), np.tile(self.checkpoints, len(self.groups))
        flat = {"influence": self.mean.reshape(-1), "samples": self.samples.reshape(-1)}
        return {"group": groups.tolist(), "checkpoint": checkpoints, **flat}

    def drawings(self, *, signs: bool = False) -> dict[str, figures.Figure]:
        """One line for each group; with `signs` in the colour of its last sign."""
        lines = dict(zip(self.groups, self.mean.tolist(), strict=True))
        return figures.drawable(evolution=figures.evolution(self.checkpoints, lines, signs=signs))


def evolution(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    at: int | str = "final",
    *,
    by: By = "thirds",
    **options: Unpack[Options],
) -> Evolution:
    """How the mean influence of each group changes over the checkpoints up to `at`.

    `by` is "thirds" (samples by first use), "steps" (occurrences by step), "source", "label", "epoch", "parts:K", several of these
    with commas, or {name: ids}. `model` gets the
    weights of each checkpoint in turn, and its own again at the end.
    """
    checkpoints = [c for c in run.checkpoints if 0 < c <= run.step_of(at)]
    if not checkpoints:
        raise UsageError("the run stores no weights after step 0. Record with steps=…, checkpoints=K.")
    progress, influences = options.pop("progress", None), []
    with restored_weights(model):
        for done, c in enumerate(checkpoints, 1):
            influences.append(mean_influence(run, run.load_weights(model, c), loss, batch, c, **options))
            if progress is not None:
                progress(done, len(checkpoints))
    return evolution_of(run, influences, by=by)


def evolution_of(run: Run, influences: Sequence[Influence], *, by: By = "thirds") -> Evolution:
    """Like `evolution`, from the influence on one query at each checkpoint."""
    names, group, *_ = grouped(run, by)
    over_time = isinstance(by, str) and all(is_time(axis) for axis in by.split(","))
    influences = _corrected([x.only(None) for x in influences]) if over_time else influences
    means, counts = [], []
    for influence in influences:
        of = group[: len(influence)]
        sums = np.bincount(of, weights=influence.only(None).scores[0].numpy(), minlength=len(names))
        count = influence.count_samples(of, len(names)).astype(float)
        means.append(np.divide(sums, count, out=np.full(len(names), np.nan), where=count > 0))
        counts.append(count)
    steps, methods = tuple(x.at for x in influences), tuple(x.method for x in influences)
    about = about_all(influences, [f"step {c}" for c in steps], "Checkpoints")
    return Evolution(steps, names, np.stack(means, 1), np.stack(counts, 1), methods, **about)


def _corrected(influences: Sequence[Influence]) -> Sequence[Influence]:
    """Sizes over time corrected at all checkpoints, or where the factors of one are not known at none: they are compared."""
    recorded = [x.quality for x in influences if not is_exact(x.method)]
    known = all(quality is not None and quality.factors for quality in recorded)
    return [x.corrected() for x in influences] if known else influences
