"""The result of a query: the influence of training samples on queries.

influence ≈ ℓ(without the sample) − ℓ(with it), in the units of the query's loss. Positive: the sample helped;
removing it would raise the query's loss.

Shapes:  Q queries, N occurrences before the step that was queried, M samples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..capture.ids import as_text, restore
from ..errors import UsageError
from . import figures
from .quality import RANKS, Quality
from .result import Result
from .row import Row
from .sign import describe_sign
from .words import describe_signs, first_words, late_from, name_method, signed

COLUMNS = ("sample", "label", "source", "step", "influence", "text")
CONTENT = ("text", "label", "source")
WORDS = 40  # letters of a text that a hit prints
ENDS, PREVIEW = 3, 5  # hits at either end that a result prints, and that a notebook shows
COUNTED = 10  # hits at either end whose weight is counted
CORRECTED = "sizes over time are rescaled to match exact results on"
UNIT = "influence in units of the query's loss; a sample's influence is the sum over its occurrences"
Lookup = Callable[..., dict[str, dict[str, Any]]]  # ids, and columns where not all are wanted -> content by id
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Hit(Row):
    """One sample, or one occurrence of it, and its influence on a query."""

    sample: int | str
    step: int  # where it was used; of a sample with several occurrences, where it mattered most
    influence: float
    occurrences: int = 1

    @property
    def words(self) -> str:
        """The sign in words."""
        return describe_sign(self.influence)

    def __str__(self) -> str:
        shown = {name: values[0] for name, values in ranking([self]).items()}
        words = {"influence": signed(self.influence), "text": f"“{first_words(shown.get('text'), WORDS)}”"}
        return "  ".join(f"{name} {words.get(name, value)}" for name, value in shown.items())


@dataclass(frozen=True)
class RankedSample(Hit):
    """A sample of a ranking, with its content where the run has it."""

    last: int = 0  # the last step that counted in which it was used
    text: str | None = None
    label: str | None = None
    source: str | None = None


def ranking(hits: Sequence[Hit]) -> dict[str, list[Any]]:
    """The columns that a table of hits has, wherever it is shown; those without content are left out."""
    columns = {name: [getattr(h, name, None) for h in hits] for name in COLUMNS}
    return {name: values for name, values in columns.items() if any(x not in (None, "") for x in values)}


def column_of(samples: Sequence[str], by: str, lookup: Lookup) -> NDArray[np.str_]:
    """The source or label of each of these samples; "(not given)" where it is not known."""
    if by not in ("source", "label"):
        raise UsageError(f"by must be 'source' or 'label', got {by!r}.")
    content = lookup(samples)
    values = [content.get(name, {}).get(by) for name in samples]
    if all(x is None for x in values):
        raise UsageError(f"the run has no {by} for its samples. Add it with run.describe(ids, {by}=…).")
    return np.array(["(not given)" if x is None else x for x in values])


class SampleIndex(NamedTuple):
    """Which sample each occurrence is of."""

    names: Any  # (M,) ids as text, sorted
    inverse: Ints  # (N,) the sample of each occurrence


class ByStep(NamedTuple):
    """Influence by training step, on one query."""

    steps: Ints  # (T,)
    influence: Floats  # (T,) summed over the step's occurrences
    size: Floats  # (T,) mean |influence| of the step's occurrences; those of a clipped step add up to 0


@dataclass(frozen=True, repr=False)
class Occurrences(Result):
    """The influence of each single use of a sample on one model."""

    sample: int | str
    steps: tuple[int, ...]
    influence: tuple[float, ...]
    method: str = field(default="", kw_only=True)
    unit = "influence of one occurrence, in units of the query's loss"
    shown = ("sample", "steps", "influence", "method")

    @property
    def words(self) -> tuple[str, ...]:
        """How many uses helped and hurt, with a remark on late ones, which little has overwritten."""
        late = [step for step in self.steps if step >= late_from(self.at)]
        many, where = len(late) > 1, ", ".join(f"{s:,}" for s in late[:6])
        why = (
            f"Its use{'s at steps' if many else ' at step'} {where} came in the last tenth of training. Little came after "
            f"to overwrite {'them, so they weigh' if many else 'it, so it weighs'} more than an earlier use would.",
        )
        return describe_signs(self.influence), *(why if late else ())

    def table(self) -> Mapping[str, Any]:
        """One line for each use."""
        return {"step": self.steps, "influence": self.influence}

    def drawings(self) -> dict[str, figures.Figure]:
        """One bar for each use."""
        return figures.drawable(occurrences=figures.occurrences(self.steps, self.influence))


@dataclass(frozen=True, repr=False)
class Influence(Result):
    """Influences of occurrences on Q queries: of all, or of the `best` highest and lowest of each query."""

    scores: Tensor  # (Q, N) float64
    sample_ids: np.ndarray[Any, Any]  # (N,) or (Q, N) ids as text
    steps: np.ndarray[Any, Any]  # same shape
    id_kind: str
    method: str  # "exact unrolling", or "adjoint" (a reverse sweep), "embeddings", "segments"; of a baseline, its name
    complete: bool = True  # False: only the highest and lowest occurrences of each query are there
    lookup: Lookup | None = None
    best: int | None = None  # how many of the highest, and of the lowest, are there; None: all
    index: SampleIndex | None = None  # of `sample_ids`, where it is known already
    of_mean: Quality | None = field(default=None, kw_only=True)  # of the mean of several queries
    unit: str = field(default=UNIT, kw_only=True)  # type: ignore[misc]  # other results have one for their class
    shown = ("method",)

    @property
    def n_queries(self) -> int:
        """How many queries there are."""
        return self.scores.shape[0]

    def __len__(self) -> int:
        return self.scores.shape[1]

    @property
    def headline(self) -> str:
        """What was queried, and how it was computed."""
        queries = "1 query" if self.n_queries == 1 else f"{self.n_queries} queries"
        return f"Influence of {len(self):,} occurrences on {queries} at step {self.at:,} (method: {name_method(self.method)})"

    # -- both ends of the ranking ----------------------------------------------------------------------------------

    def top(self, k: int = 10, *, query: int | str | None = None, per: str | None = None) -> list[RankedSample]:
        """The k most helpful, highest first: per "sample" (its occurrences summed, the default) or per "occurrence".

        A result of a query with `keep=` has single occurrences only: it ranks these, at most as many as were kept.
        """
        return self._with_content(self._ranked(k, query, per or self._per, 1.0))

    def bottom(self, k: int = 10, *, query: int | str | None = None, per: str | None = None) -> list[RankedSample]:
        """The k most harmful, lowest first; `per` as in `top`."""
        return self._with_content(self._ranked(k, query, per or self._per, -1.0))

    def hits(
        self, k: int = 10, *, query: int | str | None = None, per: str | None = None
    ) -> tuple[list[RankedSample], list[RankedSample]]:
        """`(those that helped most, those that hurt most)`, at most k of each; by default on the mean of all queries."""
        which, each = self._default(query), per or self._per
        best, worst = self.top(k, query=which, per=each), self.bottom(k, query=which, per=each)
        return [h for h in best if h.influence > 0], [h for h in worst if h.influence < 0]

    def _with_content(self, hits: Sequence[RankedSample]) -> list[RankedSample]:
        content = self.lookup([str(h.sample) for h in hits]) if self.lookup and hits else {}
        known: list[dict[str, Any]] = [{k: content.get(str(h.sample), {}).get(k) for k in CONTENT} for h in hits]
        return [replace(h, **c) for h, c in zip(hits, known, strict=True)]

    def _ranked(self, k: int, query: int | str | None, per: str, sign: float) -> list[RankedSample]:
        if per not in ("sample", "occurrence") or k < 1:
            raise UsageError(f"k must be at least 1 and per 'sample' or 'occurrence', got k={k}, per={per!r}.")
        if not self.complete and per == "sample":
            raise UsageError(
                "per='sample' needs all occurrences, but the result has only the highest and lowest (keep=). Leave per= "
                "out to rank single occurrences, or query without keep=."
            )
        one = self.only(query)
        scores = one.scores[0].numpy()
        if per == "sample":
            return one._samples_ranked(scores, k, sign)
        most = min(k, len(scores) if self.best is None else self.best)  # beyond it lies the other end
        rows = _largest(sign * scores, one.sample_ids, most, self.id_kind)
        ids = restore([str(one.sample_ids[i]) for i in rows], self.id_kind)
        steps = one.steps[rows].tolist()
        return [RankedSample(s, t, float(scores[i]), 1, t) for s, t, i in zip(ids, steps, rows, strict=True)]

    def _samples_ranked(self, scores: Floats, k: int, sign: float) -> list[RankedSample]:
        names, inverse = self._index
        counts = np.bincount(inverse, minlength=len(names))
        used = np.flatnonzero(counts)
        sums = np.bincount(inverse, weights=scores, minlength=len(names))
        ranked = used[_largest(sign * sums[used], names[used], k, self.id_kind)]
        ids = restore([str(names[j]) for j in ranked], self.id_kind)
        uses = [np.flatnonzero(inverse == j) for j in ranked]
        most = [int(self.steps[rows[np.abs(scores[rows]).argmax()]]) for rows in uses]
        last = [int(self.steps[rows].max()) for rows in uses]
        return [
            RankedSample(s, t, float(sums[j]), int(counts[j]), end)
            for s, j, t, end in zip(ids, ranked, most, last, strict=True)
        ]

    @cached_property
    def _index(self) -> SampleIndex:
        return self.index or SampleIndex(*np.unique(self.sample_ids, return_inverse=True))

    # -- parts and sums --------------------------------------------------------------------------------------------

    def only(self, query: int | str | None) -> "Influence":
        """The influence on one query, or on the mean of all ("mean")."""
        if query is None and self.n_queries > 1:
            raise UsageError(
                f"the result has {self.n_queries} queries. Pass query=0 … {self.n_queries - 1}, or query='mean'."
            )
        if query == "mean":
            self._need_all("query='mean'")
            judged = self.quality if self.n_queries == 1 else self.of_mean
            return replace(self, scores=self.scores.mean(0, keepdim=True), index=self._index, quality=judged)
        q = 0 if query is None else query
        if not isinstance(q, int) or not 0 <= q < self.n_queries:
            raise UsageError(f"query must be 0 … {self.n_queries - 1} or 'mean', got {query!r}.")
        if self.sample_ids.ndim == 2:
            return replace(self, scores=self.scores[q : q + 1], sample_ids=self.sample_ids[q], steps=self.steps[q])
        return replace(self, scores=self.scores[q : q + 1], index=self._index)

    def between(self, first: int, last: int) -> "Influence":
        """Only the occurrences of steps first … last−1, for example one epoch."""
        self._need_all("between()")
        part = np.flatnonzero((self.steps >= first) & (self.steps < last))
        names, inverse = self._index
        return replace(
            self,
            scores=self.scores[:, torch.from_numpy(part)],
            sample_ids=self.sample_ids[part],
            steps=self.steps[part],
            index=SampleIndex(names, inverse[part]),
            caveats=(*self.caveats, f"steps {first} to {last - 1} only"),
            quality=self.quality and self.quality.between(first, last),
            of_mean=self.of_mean and self.of_mean.between(first, last),
        )

    def sum_over(self, samples: Iterable[int | str], *, steps: Iterable[int] | None = None) -> Tensor:
        """Influence (Q,) of removing these samples together, at all their occurrences or only in `steps`.

        A first-order sum: it understates groups of redundant samples.
        """
        self._need_all("sum_over()")
        rows = np.isin(self._index.inverse, self._numbers(as_text(samples)[0]))
        if steps is not None:
            rows &= np.isin(self.steps, list(steps))
        return self.scores[:, torch.from_numpy(rows)].sum(1)

    def occurrences(self, sample: int | str, *, query: int | str | None = None) -> Occurrences:
        """The influence of each single use of a sample on a query."""
        self._need_all("occurrences()")
        one = self.only(query)
        rows = np.flatnonzero(one._index.inverse == self._numbers(as_text([sample])[0])[0])
        steps, values = one.steps[rows].tolist(), one.scores[0, torch.from_numpy(rows)].tolist()
        return Occurrences(sample, tuple(steps), tuple(values), method=self.method, **self.about)

    def _numbers(self, wanted: Sequence[str]) -> Ints:
        """The numbers of these samples, all of which occurred."""
        names, inverse = self._index
        at = np.minimum(np.searchsorted(names, wanted), max(0, len(names) - 1))
        missing = [x for x, j in zip(wanted, at, strict=True) if not len(names) or names[j] != x]
        if missing:
            raise UsageError(
                f"{len(missing)} of the samples, such as {min(missing)!r}, were never used before step {self.at}. "
                "Leave them out."
            )
        if elsewhere := [str(names[j]) for j in np.setdiff1d(at, inverse)]:
            raise UsageError(
                f"{len(elsewhere)} of the samples, such as {min(elsewhere)!r}, were not used in the steps that this part of a "
                "result has. Leave them out, or take the whole result."
            )
        return at

    def count_samples(self, group: Ints, n: int) -> Ints:
        """How many different samples each of n groups has, given the group of each occurrence."""
        names, inverse = self._index
        return np.bincount(np.unique(group * len(names) + inverse) // max(1, len(names)), minlength=n)

    def by_step(self, query: int | str | None = None) -> ByStep:
        """The influence of each step's occurrences on a query: their sum, and the mean absolute value (`size`).

        Recorded values are corrected where calibration measured their sizes over time (`corrected`).
        """
        self._need_all("by_step()")
        one = self.only(query).corrected()
        scores, steps = one.scores[0].numpy(), one.steps
        count = np.maximum(1, np.bincount(steps, minlength=self.at))
        size = np.bincount(steps, weights=np.abs(scores), minlength=self.at) / count
        return ByStep(np.arange(self.at), np.bincount(steps, weights=scores, minlength=self.at).astype(float), size)

    def per_sample(self) -> tuple[list[int | str], Tensor]:
        """`(ids, influences (Q, ids))`: removal from all steps, occurrences summed."""
        self._need_all("per_sample()")
        names, inverse = self._index
        out = torch.zeros(self.n_queries, len(names), dtype=self.scores.dtype)
        out.index_add_(1, torch.from_numpy(inverse), self.scores)
        used = np.flatnonzero(np.bincount(inverse, minlength=len(names)))
        return restore([str(x) for x in names[used]], self.id_kind), out[:, torch.from_numpy(used)]

    def group_by(self, column: str) -> dict[str, Tensor]:
        """Summed influence (Q,) of each "source" or "label", highest mean first; needs content in the run."""
        self._need_all("group_by()")
        names, inverse = self._index
        labels = column_of(names.tolist(), column, self.lookup or (lambda ids: {}))[inverse]
        totals = {x: self.scores[:, torch.from_numpy(labels == x)].sum(1) for x in np.unique(labels).tolist()}
        return dict(sorted(totals.items(), key=lambda item: -float(item[1].mean())))

    # -- shown -----------------------------------------------------------------------------------------------------

    def as_dict(self, *, top: int = 10, per: str | None = None, query: int | str | None = None) -> dict[str, Any]:
        """Plain values, for JSON: `hits` highest first, `harmful` lowest first, of one query or of the mean of several."""
        which, each = self._default(query), per or self._per
        ends = {"hits": self._ranked(top, which, each, 1.0), "harmful": self._ranked(top, which, each, -1.0)}
        return {
            **super().as_dict(),
            "query": which,
            "per": each,
            **{k: [Hit(h.sample, h.step, h.influence, h.occurrences).as_dict() for h in v] for k, v in ends.items()},
        }

    def numbers(self) -> dict[str, Any]:
        """How it was computed."""
        return {"method": self.method, "queries": self.n_queries, "occurrences": len(self)}

    def _default(self, query: int | str | None = None) -> int | str:
        return query if query is not None else "mean" if self.complete and self.n_queries > 1 else 0

    @property
    def _per(self) -> str:
        return "sample" if self.complete else "occurrence"

    def table(self) -> Mapping[str, Any]:
        """One line for each query and occurrence, with the sample's label and source where the run has them."""
        q, m = self.scores.shape
        ids, steps = (np.broadcast_to(x, (q, m)).reshape(-1) for x in (self.sample_ids, self.steps))
        queries, values = np.repeat(np.arange(q), m), self.scores.reshape(-1).numpy()
        known = self.lookup(np.unique(self.sample_ids).tolist(), ("label", "source")) if self.lookup else {}
        columns = {by: [known.get(name, {}).get(by) for name in ids.tolist()] for by in ("label", "source")}
        about = {by: column for by, column in columns.items() if any(x is not None for x in column)}
        names = restore(ids.tolist(), self.id_kind)
        return {"query": queries, "sample": names, **about, "step": steps, "influence": values}

    def drawings(self) -> dict[str, figures.Figure]:
        """The influence of each step on the query, or on the mean of several."""
        if not self.complete:
            return {}
        one = self.only(self._default())
        return figures.drawable(by_step=figures.by_step(*one.by_step(), figures.strip(one.quality)))

    @property
    def title(self) -> str:
        """What was queried, and which query the ranking is of."""
        which = f"the mean of {self.n_queries} queries" if self._default() == "mean" else f"query 1 of {self.n_queries}"
        return self.headline if self.n_queries == 1 else f"{self.headline}: {which}"

    def lines(self) -> tuple[str, ...]:
        """A few hits at either end, each with its strongest first."""
        best, worst = self.hits(ENDS)
        return *map(str, best), *map(str, worst)

    def preview(self) -> Mapping[str, Any]:
        """Both ends of the ranking, each with its strongest first."""
        best, worst = self.hits(PREVIEW)
        return ranking([*best, *worst])

    @property
    def words(self) -> tuple[str, ...]:
        """How much of the first samples' influence comes from parts of the run where the ranking is reliable."""
        judged = self.only(self._default()).quality
        if judged is None or judged.exact or not judged.measured or not len(self):
            return ()
        hits = [h for side in self.hits(COUNTED) for h in side]
        steps, values = self._uses_of(hits)
        weight = np.abs(values)
        if not weight.sum() > 0:
            return ()
        share = weight[judged.ranked(steps)].sum() / weight.sum()
        return (
            f"{share:.0%} of the total |influence| of the top {len(hits)} samples comes from parts of the run where the ranking is "
            f"reliable (rank correlation of at least {RANKS:g}).",
        )

    def _uses_of(self, hits: Sequence[Hit]) -> tuple[Any, Any]:
        """`(steps, influences)` of the single uses that these hits are made of."""
        if not self.complete:
            return [h.step for h in hits], [h.influence for h in hits]
        one = self.only(self._default())
        rows = np.isin(one._index.inverse, one._numbers(as_text([h.sample for h in hits])[0]))
        return one.steps[rows], one.scores[0].numpy()[rows]

    def corrected(self) -> "Influence":
        """With sizes over time as calibration measured them: the recorded influences of each twentieth of the run times its factor.

        For sums and sizes over time. Ranks within a part stay what they are.
        """
        if self.quality is None or self.quality.exact or not self.quality.factors or self.sample_ids.ndim > 1:
            return self
        factor = torch.from_numpy(self.quality.correction(self.steps, self.at)).to(self.scores)
        once: dict[str, Any] = {
            "quality": replace(self.quality, factors=()),
            "of_mean": self.of_mean and replace(self.of_mean, factors=()),
        }
        return replace(
            self, scores=self.scores * factor, caveats=(*self.caveats, f"{CORRECTED} {self.quality.on}"), **once
        )

    def _need_all(self, what: str) -> None:
        if not self.complete:
            raise UsageError(
                f"{what} needs all occurrences, but the result has only the highest and lowest. Query without keep=."
            )


def _largest(values: NDArray[Any], ids: Any, k: int, kind: str) -> Ints:
    """The places of the k largest values, largest first; equal values in the order of ids (numbers: by size), then of time."""
    if k < len(values):
        rows = np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    else:
        rows = np.arange(len(values))
    names = ids[rows]
    lengths = np.char.str_len(names) if kind == "int" else np.zeros(len(rows))
    ranked: Ints = rows[np.lexsort((rows, names, lengths, -values[rows]))[:k]]
    return ranked
