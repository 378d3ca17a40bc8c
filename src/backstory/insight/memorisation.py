"""Self-influence: does a training sample rank first for its own loss?

Each query is a copy of a training sample. Its rank is that sample's rank among all samples by influence on the query; 1 is first.
A sample that the model has memorised ranks first; one whose effect other samples have overwritten does not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.ids import as_text, restore
from ..errors import UsageError
from ..results import figures
from ..results.influence import Influence
from ..results.result import Result
from ..run.gradients import LossFn
from ..run.run import Run
from .mean import Options
from .phases import Curve


@dataclass(frozen=True, repr=False)
class Memorisation(Result):
    """The rank and influence of each query's own sample."""

    ids: tuple[int | str, ...]  # (Q)
    rank: Curve  # (Q,) 1: no sample has more influence on the query than its own
    influence: Curve  # (Q,) self-influence, in units of the query's loss
    samples: int  # that were ranked
    method: str = field(default="", kw_only=True)  # of the influence
    unit = "self-influence in units of the query's loss; rank 1: no sample has more influence on the query"
    shown = ("ids", "rank", "influence", "samples", "share_first", "median_rank", "method")

    @property
    def share_first(self) -> float:
        """Share of the queries whose own sample ranks first."""
        return float((self.rank == 1).mean())

    @property
    def median_rank(self) -> float:
        """Median rank of the own sample."""
        return float(np.median(self.rank))

    @property
    def headline(self) -> str:
        """The ranks in one sentence."""
        summary = f"first in {self.share_first:.0%}, median {self.median_rank:g}"
        return (
            f"Rank of each query's own sample among {self.samples:,} samples for the model at step {self.at}: {summary}"
        )

    def table(self) -> dict[str, Any]:
        """One line for each query."""
        return {"sample": list(self.ids), "rank": self.rank, "influence": self.influence}

    def drawings(self) -> dict[str, figures.Figure]:
        """Ranks of all queries, sorted."""
        return {"ranks": figures.ranks(self.rank.tolist())}


def memorisation(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    ids: Iterable[int | str] | Tensor,
    at: int | str = "final",
    **options: Unpack[Options],
) -> Memorisation:
    """Rank each sample of `ids` by its influence on its own copy in `batch` (same order), for the model at `at`."""
    return memorisation_of(run.query(model, loss, batch, at, **options), ids)


def memorisation_of(influence: Influence, ids: Iterable[int | str] | Tensor) -> Memorisation:
    """Like `memorisation`, from an existing result of any attribution method: query q is a copy of sample ids[q]."""
    names, kind = as_text(ids)
    if influence.n_queries != len(names):
        raise UsageError(f"batch and ids must match, got {influence.n_queries} losses for {len(names)} ids.")
    known, scores = influence.per_sample()  # (Q, M)
    place = {str(x): i for i, x in enumerate(known)}
    if missing := [x for x in names if x not in place]:
        raise UsageError(
            f"sample {missing[0]!r} was never used before step {influence.at}. Leave it out, or query a later step."
        )
    self_influence = scores.gather(1, torch.tensor([[place[x]] for x in names]))  # (Q, 1)
    rank = (1 + (scores > self_influence).sum(1)).double().numpy()
    values = self_influence[:, 0].double().numpy()
    return Memorisation(
        tuple(restore(names, kind)), rank, values, len(known), method=influence.method, **influence.about
    )
