"""How the influence of groups of samples grows and fades from checkpoint to checkpoint (the paper's saturation figure).

At each stored checkpoint c, the queries' mean loss is asked of the model at c, and the influence on it of all occurrences before c is averaged
over the samples of each group that were used by then. From segments where the run is embedded in them (`run.embed(segments=K)`),
else by one adjoint sweep for each checkpoint.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..errors import UsageError
from ..run.embed import Asked, Progress
from ..run.gradients import LossFn
from ..run.run import Run
from . import plots
from .asking import SIGN, mean_answer, said, weights_kept
from .groups import Ids, grouped
from .notebook import InNotebook
from .shapes import Curve

UNIT = "mean influence of one sample of the group (its occurrences so far summed), in units of the queries' mean loss"


@dataclass(frozen=True)
class Evolution(InNotebook):
    """Mean influence of each group on the model at each checkpoint."""

    checkpoints: tuple[int, ...]
    groups: tuple[str, ...]
    mean: Curve  # (G, C); NaN where no sample of the group had been used
    samples: Curve  # (G, C) how many samples the mean is over
    method: tuple[str, ...]  # of each checkpoint: "segments", "embeddings" or "adjoint"
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        means = {g: self.mean[i].tolist() for i, g in enumerate(self.groups)}
        counts = {g: self.samples[i].tolist() for i, g in enumerate(self.groups)}
        told = {"checkpoints": list(self.checkpoints), "mean": means, "samples": counts, "method": list(self.method)}
        return {**told, "notes": list(self.notes), "sign": SIGN, "unit": UNIT}

    def figure(self) -> Any:
        """One line for each group."""
        drawn = plots.figure(
            ("Mean influence of a sample on the model at each checkpoint",), "checkpoint (step)", ("influence",)
        )
        for i, name in enumerate(self.groups):
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            drawn.add_scatter(
                x=list(self.checkpoints),
                y=self.mean[i].tolist(),
                mode="lines+markers",
                name=name,
                line={"color": colour},
            )
        return drawn

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each group and checkpoint."""
        places = [(i, j) for i in range(len(self.groups)) for j in range(len(self.checkpoints))]
        columns: dict[str, list[Any]] = {
            "group": [self.groups[i] for i, _ in places],
            "checkpoint": [self.checkpoints[j] for _, j in places],
            "influence": [self.mean[i, j] for i, j in places],
            "samples": [self.samples[i, j] for i, j in places],
        }
        return plots.frame(columns)


def evolution(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    *,
    by: str | Ids = "thirds",
    per_layer: bool = False,
    contraction: Asked = "auto",
    progress: Progress | None = None,
) -> Evolution:
    """Groups "thirds" (of samples by first use), "steps" (of occurrences by step), "source", "label", or {name: ids}.

    `model` is given the weights of one checkpoint after the other, and its own again at the end.
    """
    found = [c for c in run.checkpoints if c > 0]
    if not found:
        raise UsageError("the run stores no weights after its first step; record with checkpoints=K, steps=….")
    names, group = grouped(run, by)
    means, counts, hows = [], [], []
    notes: tuple[str, ...] = ()
    with weights_kept(model):
        for done, c in enumerate(found, 1):
            answer = mean_answer(
                run, run.load_weights(model, c), loss, batch, c, per_layer=per_layer, contraction=contraction
            )
            of = group[: len(answer)]
            sums = np.bincount(of, weights=answer.scores[0].numpy(), minlength=len(names))
            count = np.array([len(np.unique(answer.sample_ids[of == g])) for g in range(len(names))], dtype=float)
            means.append(np.divide(sums, count, out=np.full(len(names), np.nan), where=count > 0))
            counts.append(count)
            hows.append(answer.method)
            notes = said(answer)
            if progress is not None:
                progress(done, len(found))
    return Evolution(tuple(found), names, np.stack(means, 1), np.stack(counts, 1), tuple(hows), notes)
