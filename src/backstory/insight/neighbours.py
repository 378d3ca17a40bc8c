"""One sample: which others taught the model much the same, and which queries it helped and hurt.

Two samples are similar where their embeddings, summed over all their occurrences, point the same way: their removal would
change every loss in the same proportion. Similarity is the cosine, from −1 to +1.

Shapes:  N occurrences, M samples, p dimensions, Q queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture.ids import as_text, restore
from ..errors import UsageError
from ..results import figures
from ..results.influence import Influence
from ..results.result import Result
from ..results.row import Row
from ..run.embed import Progress
from ..run.run import Run
from .phases import Curve

AT_ONCE = 4096  # samples whose embeddings are summed at once


@dataclass(frozen=True)
class Neighbour(Row):
    """A sample that is like another one."""

    sample: int | str
    similarity: float


@dataclass(frozen=True, repr=False)
class Neighbours(Result):
    """The samples that are most like one sample."""

    sample: int | str
    neighbours: tuple[Neighbour, ...]  # most similar first
    unit = "cosine similarity of the samples' embeddings, each summed over its occurrences: from −1 to +1"
    shown = ("sample", "neighbours")

    @property
    def headline(self) -> str:
        """Whose neighbours they are."""
        return f"Samples whose effect on the model at step {self.at} is most like that of sample {self.sample}"

    def table(self) -> dict[str, Any]:
        """One line for each neighbour."""
        return Neighbour.table(self.neighbours)

    def drawings(self) -> dict[str, figures.Figure]:
        """Bars of similarity."""
        names, values = self.table().values()
        return figures.drawable(neighbours=figures.ranking([str(x) for x in names], values))


@dataclass(frozen=True)
class QueryInfluence(Row):
    """The influence of a sample on one query of a set."""

    query: int
    influence: float


@dataclass(frozen=True, repr=False)
class OnQueries(Result):
    """The queries that one sample helped and hurt most."""

    sample: int | str
    queries: int  # of how many
    helped: tuple[QueryInfluence, ...]  # most first
    hurt: tuple[QueryInfluence, ...]  # most first
    method: str = field(default="", kw_only=True)  # of the influence
    shown = ("sample", "queries", "helped", "hurt", "method")

    @property
    def headline(self) -> str:
        """The sample and the queries."""
        return f"Influence of sample {self.sample} on each of {self.queries} queries for the model at step {self.at}"

    def table(self) -> dict[str, Any]:
        """One line for each query."""
        return QueryInfluence.table((*self.helped, *self.hurt))

    def drawings(self) -> dict[str, figures.Figure]:
        """Bars of influence."""
        rows = (*self.helped, *self.hurt[::-1])
        return figures.drawable(queries=figures.ranking([str(x.query) for x in rows], [x.influence for x in rows]))


def neighbours(run: Run, sample: int | str, at: int | str = "final", *, top: int = 10) -> Neighbours:
    """The samples with the most similar embeddings (cosine); needs the embeddings that `run.embed` stores."""
    step = run.step_of(at)
    E, (names, _) = run.embeddings(step), run.occurrences(step)
    (name,), kind = as_text([sample])
    ids, inverse = np.unique(names, return_inverse=True)
    if name not in ids:
        raise UsageError(f"sample {sample!r} was never used before step {step}.")
    j = int(np.searchsorted(ids, name))
    total = E[torch.from_numpy(np.flatnonzero(inverse == j))].sum(0)  # (p,)
    inner = np.bincount(inverse, weights=(E @ total).double().numpy(), minlength=len(ids))
    size = _norms(E, inverse, len(ids)) * float(total.norm())
    cosine = np.clip(np.divide(inner, size, out=np.zeros(len(ids)), where=size > 0), -1.0, 1.0)
    cosine[j] = -np.inf
    first = np.argsort(-cosine, kind="stable")[: min(top, len(ids) - 1)]
    others = restore([str(ids[i]) for i in first], kind)
    pairs = tuple(Neighbour(x, float(cosine[i])) for x, i in zip(others, first, strict=True))
    return Neighbours(sample, pairs, at=step, caveats=tuple(run.caveats()))


def _norms(E: Tensor, inverse: Any, n: int, at_once: int = AT_ONCE) -> Curve:
    """‖Σ e‖ of every sample, (M,); some samples at a time."""
    order, out = np.argsort(inverse, kind="stable"), np.zeros(n)
    for first in range(0, n, at_once):
        lo, hi = np.searchsorted(inverse[order], (first, first + at_once))
        sums = torch.zeros(min(at_once, n - first), E.shape[1], dtype=E.dtype)
        sums.index_add_(0, torch.from_numpy(inverse[order[lo:hi]] - first), E[torch.from_numpy(order[lo:hi])])
        out[first : first + len(sums)] = sums.norm(dim=1).double().numpy()
    return out


def on_queries(
    run: Run,
    v: Tensor,
    sample: int | str,
    at: int | str = "final",
    *,
    top: int = 10,
    caveats: Sequence[str] = (),
    progress: Progress | None = None,
) -> OnQueries:
    """The queries, given by their gradients v (Q, p) in the run's coordinates, that a sample helped and hurt most.

    Fast if the run's embeddings are in memory (`run.load_embeddings`).
    """
    step, E = run.step_of(at), run.sample_embeddings(sample, at)
    if E is None:
        return on_queries_of(run.query_gradients(v, step, caveats=caveats, progress=progress), sample, top=top)
    values = (v.float() @ E.sum(0)).double()  # (Q,)
    about = {"at": step, "caveats": (*caveats, *run.caveats()), "quality": run.quality(step)}
    about["recording"] = run.recording_report(step)
    return _ends(sample, values, top, method="embeddings", **about)


def on_queries_of(influence: Influence, sample: int | str, *, top: int = 10) -> OnQueries:
    """Like `on_queries`, from the influence on these queries."""
    return _ends(sample, influence.sum_over([sample]), top, method=influence.method, **influence.about)


def _ends(sample: int | str, values: Tensor, top: int, **about: Any) -> OnQueries:
    order = np.argsort(-values.numpy(), kind="stable").tolist()
    helped = tuple(QueryInfluence(q, float(values[q])) for q in order[:top] if values[q] > 0)
    hurt = tuple(QueryInfluence(q, float(values[q])) for q in order[::-1][:top] if values[q] < 0)
    return OnQueries(sample, len(values), helped, hurt, **about)
