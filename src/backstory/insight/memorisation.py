"""Self-influence: does a training sample, asked about itself, name itself?

Each query is a copy of a training sample; its rank is the place of that sample among all samples, by influence on the query, 1 being first.
A sample that the model has memorised ranks first; one whose lesson others have taken over does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.ids import as_text, restore
from ..errors import UsageError
from ..results.influence import Influence
from ..run.embed import Asked, Progress
from ..run.gradients import LossFn
from ..run.run import Run
from . import plots
from .asking import SIGN, said
from .notebook import InNotebook
from .shapes import Curve


@dataclass(frozen=True)
class Memorisation(InNotebook):
    """The rank and influence of each query's own sample."""

    at: int
    ids: tuple[int | str, ...]  # (Q)
    rank: Curve  # (Q,) 1: no sample has more influence on the query than its own
    influence: Curve  # (Q,) self-influence, in units of the query's loss
    samples: int  # that were ranked
    notes: tuple[str, ...] = ()

    @property
    def share_first(self) -> float:
        """Share of the queries whose own sample ranks first."""
        return float((self.rank == 1).mean())

    @property
    def median_rank(self) -> float:
        """Median rank of the own sample."""
        return float(np.median(self.rank))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        told = {"at": self.at, "ids": list(self.ids), "rank": self.rank.tolist(), "influence": self.influence.tolist()}
        summary = {"samples": self.samples, "share_first": self.share_first, "median_rank": self.median_rank}
        return {**told, **summary, "notes": list(self.notes), "sign": SIGN}

    def figure(self) -> Any:
        """Ranks of all queries, sorted."""
        title = f"Rank of the own sample among {self.samples:,}: first in {self.share_first:.0%}, median {self.median_rank:g}"
        drawn = plots.figure((title,), "queries, sorted by rank", ("rank",))
        drawn.add_scatter(y=np.sort(self.rank).tolist(), mode="lines+markers", line={"color": plots.COLOURS[0]})
        drawn.update_yaxes(type="log")
        return drawn

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each query."""
        return plots.frame({"sample": list(self.ids), "rank": self.rank, "influence": self.influence})


def memorisation(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    ids: Iterable[int | str] | Tensor,
    at: int | str = "final",
    *,
    per_layer: bool = False,
    contraction: Asked = "auto",
    unverified: bool = False,
    progress: Progress | None = None,
) -> Memorisation:
    """Ranks of the samples `ids`, whose copies are the queries of `batch` in the same order, on the model at `at`."""
    answer = run.query(
        model, loss, batch, at, per_layer=per_layer, contraction=contraction, unverified=unverified, progress=progress
    )
    return self_ranks(answer, ids)


def self_ranks(answer: Influence, ids: Iterable[int | str] | Tensor) -> Memorisation:
    """The same from an answer that is there already, by any method of attribution: query q is a copy of sample ids[q]."""
    names, kind = as_text(ids)
    if answer.n_queries != len(names):
        raise UsageError(f"found {answer.n_queries} losses for {len(names)} ids; expected one loss for each sample.")
    known, scores = answer.per_sample()  # (Q, M)
    place = {str(x): i for i, x in enumerate(known)}
    if missing := [x for x in names if x not in place]:
        raise UsageError(f"sample {missing[0]!r} never occurred before step {answer.at}; leave it out, or ask later.")
    own = scores.gather(1, torch.tensor([[place[x]] for x in names]))  # (Q, 1)
    rank = 1 + (scores > own).sum(1)
    return Memorisation(
        answer.at,
        tuple(restore(names, kind)),
        rank.double().numpy(),
        own[:, 0].double().numpy(),
        len(known),
        said(answer),
    )
