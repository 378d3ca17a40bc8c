"""What each data source is worth, with uncertainty, and for which kind of queries.

The value of a source is the sum of the influences of its samples on the mean loss of the queries: a first-order estimate of what
removing the whole source would do. It understates sources whose samples stand in for each other. The 95 % interval is that
of a bootstrap: samples are drawn anew inside each source, and queries inside each domain. Exact values are used where they are stored.

Shapes:  S sources, D domains, Q queries of a domain, M samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Unpack

import numpy as np
from torch import Tensor, nn

from ..errors import UsageError
from ..results import figures
from ..results.influence import Influence
from ..results.result import Result
from ..results.row import Row
from ..results.words import name_label
from ..run.gradients import LossFn
from ..run.groups import column
from ..run.run import Run
from .mean import Options, about_all, find_exact
from .phases import Curve

DRAWS = 1000
AT_ONCE = 1 << 24  # numbers of the bootstrap that are held at once
ALL = "all queries"
ONE_MEAN = "exact for the mean of its queries, so that its intervals cover chance in the samples alone"


@dataclass(frozen=True)
class Value(Row):
    """What one source is worth for one query set."""

    source: str
    domain: str  # the query set's name
    samples: int
    queries: int
    value: float
    low: float  # 95 % interval
    high: float

    @property
    def per_sample(self) -> float:
        """Value of one of its samples, on average."""
        return self.value / self.samples

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return not self.low <= 0 <= self.high

    @property
    def words(self) -> str:
        """Helps or hurts; not clear where the interval includes 0."""
        return "not clear" if not self.clear else "helps" if self.value > 0 else "hurts"


@dataclass(frozen=True, repr=False)
class Sources(Result):
    """Values of all sources: for each query set (`domains`), and for all of them together."""

    by: str
    sources: tuple[str, ...]  # most valuable first
    domains: tuple[str, ...]
    total: tuple[Value, ...]  # (S) every domain's mean loss counts alike
    cells: tuple[tuple[Value, ...], ...]  # (S, D)
    method: tuple[str, ...] = field(default=(), kw_only=True)  # of each domain
    unit = "summed influence of the source's samples, in units of the queries' mean loss"
    interval: ClassVar[str] = "95 %"
    shown = ("by", "sources", "domains", "total", "cells", "matrix", "clear", "interval", "method")

    @property
    def matrix(self) -> Curve:
        """Values (S, D)."""
        return np.array([[cell.value for cell in row] for row in self.cells])

    @property
    def clear(self) -> list[list[bool]]:
        """Of each number of the matrix: whether its interval leaves 0 out."""
        return [[cell.clear for cell in row] for row in self.cells]

    @property
    def headline(self) -> str:
        """What the values are of."""
        return f"Value of each {self.by} for the model at step {self.at}, with {self.interval} intervals"

    def table(self) -> dict[str, Any]:
        """One line for each source and domain."""
        return Value.table(cell for row in self.cells for cell in row)

    def drawings(self) -> dict[str, figures.Figure]:
        """Bars with intervals, and the matrix of sources and domains."""
        names, rows = [name_label(x, self.by) for x in self.sources], [(v.value, v.low, v.high) for v in self.total]
        bars = figures.sources(names, rows, [v.words for v in self.total])
        matrix = figures.matrix(names, self.domains, self.matrix.tolist(), self.clear)
        return figures.drawable(sources=bars, matrix=matrix)


def sources(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batches: Mapping[str, Any],
    at: int | str = "final",
    *,
    by: str = "source",
    draws: int = DRAWS,
    seed: int = 0,
    **options: Unpack[Options],
) -> Sources:
    """The value of each source (or label) for each query set: `batches` is {name: batch}."""
    if not batches or draws < 40:
        raise UsageError(
            f"sources() needs at least one query set and draws of at least 40, got {len(batches)} query sets and "
            f"draws={draws}."
        )
    step = run.step_of(at)
    each = {domain: _influence(run, model, loss, batch, step, domain, options) for domain, batch in batches.items()}
    return sources_of(run, each, by=by, draws=draws, seed=seed)


def _influence(
    run: Run, model: nn.Module, loss: LossFn, batch: Any, step: int, domain: str, options: Options
) -> Influence:
    """On each query; on the mean of the set where only that is stored as an exact result."""
    quiet: Options = {**options, "method": "auto"} if options.get("method") == "exact" else options
    if find_exact(run, model, loss, batch, step, quiet, mean=False).result is None:
        mean = find_exact(run, model, loss, batch, step, options, mean=True).result
        if mean is not None:
            return replace(mean, caveats=(f"{domain}: {ONE_MEAN}", *mean.caveats))
    return run.query(model, loss, batch, step, **options)


def sources_of(
    run: Run, influences: Mapping[str, Influence], *, by: str = "source", draws: int = DRAWS, seed: int = 0
) -> Sources:
    """Like `sources`, from the influence on each query set: `influences` is {name: influence}."""
    first = next(iter(influences.values()))
    ids, _ = first.per_sample()
    labels = column(run, np.array([str(x) for x in ids]), by)
    names, inverse = np.unique(labels, return_inverse=True)
    counts, scores = np.bincount(inverse), [x.per_sample()[1].numpy() for x in influences.values()]
    drawn = bootstraps(scores, inverse, draws, seed)  # (D, draws, S)
    values = np.stack([_summed(x.mean(0)[None], inverse, len(names))[0] for x in scores])  # (D, S)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)  # (D, S)
    ends = np.quantile(drawn.mean(0), [0.025, 0.975], axis=0)  # (2, S)
    order = np.argsort(-values.mean(0), kind="stable").tolist()

    def value(s: int, domain: str, queries: int, *numbers: Any) -> Value:
        return Value(str(names[s]), domain, int(counts[s]), queries, *map(float, numbers))

    total = [value(s, ALL, sum(map(len, scores)), values[:, s].mean(), *ends[:, s]) for s in order]
    cells = [
        tuple(value(s, name, len(scores[d]), values[d, s], low[d, s], high[d, s]) for d, name in enumerate(influences))
        for s in order
    ]
    named, methods = tuple(str(names[s]) for s in order), tuple(x.method for x in influences.values())
    about = about_all([x.only("mean") for x in influences.values()], list(influences), "Query sets")
    return Sources(by, named, tuple(influences), tuple(total), tuple(cells), method=methods, **about)


def bootstraps(scores: Sequence[Curve], group: Any, draws: int, seed: int, *, at_once: int = AT_ONCE) -> Curve:
    """Values (D, draws, S) of scores (Q, M) of each domain with its queries, and samples inside each group (M,), drawn anew.

    The samples are drawn once, so that all domains see the same.
    """
    counts, places = np.bincount(group), np.argsort(group, kind="stable")  # samples of one group side by side
    of_queries = [np.random.default_rng([seed, 0]) for _ in scores]
    of_groups = [np.random.default_rng([seed, 1 + k]) for k in range(len(counts))]
    size, out = max(1, at_once // len(group)), []
    for lo in range(0, draws, size):
        n = min(size, draws - lo)
        each = zip(of_groups, counts, strict=True)
        times = np.concatenate([g.multinomial(c, np.full(c, 1 / c), size=n) for g, c in each], 1)  # (n, M)
        means = (_drawn(x, rng, n)[:, places] for x, rng in zip(scores, of_queries, strict=True))  # (n, M) each
        out.append(np.stack([_summed(x * times, group[places], len(counts)) for x in means]))
    return np.concatenate(out, 1)


def _drawn(scores: Curve, rng: np.random.Generator, n: int) -> Curve:
    """Means over queries that are drawn anew, (n, M)."""
    Q = len(scores)
    means: Curve = rng.multinomial(Q, np.full(Q, 1 / Q), size=n) / Q @ scores
    return means


def _summed(values: Curve, group: Any, n: int) -> Curve:
    """Sums (…, n) over the samples of each group."""
    member = np.zeros((len(group), n))
    member[np.arange(len(group)), group] = 1.0
    return values @ member


# -- which query sets are domains -----------------------------------------------------------------------------------


def domains(sets: Mapping[str, Any]) -> list[str]:
    """Names of the query sets that sources are valued for by default, in their order; at least one where there are sets.

    Every set's mean loss has the same weight, so no query may count twice: a set whose queries are all in other sets, such as one
    passage of each source or a few hard images out of many, is left out. Larger sets are checked first.
    """
    known = {name: _queries(batch) for name, batch in sets.items()}
    left = dict(known)
    for name in sorted(known, key=lambda n: -len(known[n])):
        others = {query for n, queries in left.items() if n != name for query in queries}
        if known[name] and known[name] <= others:
            del left[name]
    return list(left)


def _queries(batch: Any) -> frozenset[tuple[bytes, ...]]:
    """The bytes of each query; none where a batch is not made of tensors."""
    parts = list(_tensors(batch))
    rows = zip(*(_rows(x) for x in parts), strict=False)
    return frozenset() if None in parts else frozenset(rows)


def _tensors(batch: Any) -> Iterator[Tensor | None]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            yield from _tensors(part)
    else:
        yield batch if isinstance(batch, Tensor) and batch.ndim else None


def _rows(x: Tensor | None) -> list[bytes]:
    if x is None:
        return []
    shape = f"{x.dtype} {tuple(x.shape[1:])} ".encode()
    return [shape + row.detach().cpu().contiguous().numpy().tobytes() for row in x]
