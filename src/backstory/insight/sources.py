"""What each source of data is worth, with an uncertainty, and for which kind of queries.

The value of a source is the sum of the influences of its samples on the mean loss of the queries: a first-order estimate of what
removing the whole source would do. It understates sources whose samples stand in for each other. The 95 % interval is that
of a bootstrap: samples are drawn anew inside each source, and queries inside each domain.

Shapes:  S sources, D domains, Q queries of a domain, M samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from ..errors import UsageError
from ..run.embed import Asked, Progress
from ..run.gradients import LossFn
from ..run.run import Run
from . import plots
from .asking import SIGN, said
from .groups import column
from .notebook import InNotebook
from .shapes import Curve

UNIT = "summed influence of the source's samples, in units of the queries' mean loss"
DRAWS = 1000
AT_ONCE = 1 << 24  # numbers of the bootstrap that are held at once
ALL = "all queries"


@dataclass(frozen=True)
class Value:
    """What one source is worth for one domain."""

    source: str
    domain: str
    samples: int
    queries: int
    value: float
    low: float  # 95 % interval
    high: float

    @property
    def per_sample(self) -> float:
        """Value of one of its samples, on average."""
        return self.value / self.samples


@dataclass(frozen=True)
class Sources(InNotebook):
    """Values of all sources: for each domain, and for all queries together."""

    at: int
    by: str
    sources: tuple[str, ...]  # most valuable first
    domains: tuple[str, ...]
    total: tuple[Value, ...]  # (S) every domain's mean loss counts alike
    cells: tuple[tuple[Value, ...], ...]  # (S, D)
    notes: tuple[str, ...] = ()

    @property
    def matrix(self) -> Curve:
        """Values (S, D)."""
        return np.array([[cell.value for cell in row] for row in self.cells])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "matrix": self.matrix.tolist(), "sign": SIGN, "unit": UNIT, "interval": "95 %"}

    def figure(self) -> Any:
        """Bars with intervals, and the matrix of sources and domains."""
        many = len(self.domains) > 1
        titles = (f"Value of each {self.by}, 95 % intervals", *(["Value for each domain of queries"] if many else []))
        drawn = plots.figure(
            titles, self.by if not many else "domain", ("influence", self.by)[: len(titles)], shared=False
        )
        bars = {"type": "data", "symmetric": False, "array": [v.high - v.value for v in self.total]}
        bars["arrayminus"] = [v.value - v.low for v in self.total]
        drawn.add_bar(x=list(self.sources), y=[v.value for v in self.total], error_y=bars, name="value", row=1, col=1)
        if many:
            reach = float(np.abs(self.matrix).max()) or 1.0
            place = {"len": 0.45, "y": 0.2}
            drawn.add_heatmap(
                z=self.matrix.tolist(), x=list(self.domains), y=list(self.sources), zmin=-reach, zmax=reach,
                colorscale="RdBu", colorbar=place, row=2, col=1,
            )  # fmt: skip
        return drawn

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each source and domain."""
        cells = [asdict(cell) for row in self.cells for cell in row]
        return plots.frame({k: [c[k] for c in cells] for k in cells[0]})


def sources(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batches: Mapping[str, Any],
    at: int | str = "final",
    *,
    by: str = "source",
    per_layer: bool = False,
    contraction: Asked = "auto",
    draws: int = DRAWS,
    seed: int = 0,
    unverified: bool = False,
    progress: Progress | None = None,
) -> Sources:
    """Values of the sources (or labels) of the samples, for each set of queries: `batches` is {domain: batch}."""
    if not batches or draws < 40:
        raise UsageError(
            f"found {len(batches)} query sets and draws={draws}; expected one or more, and 40 draws or more."
        )
    scores, step = {}, run.step_of(at)
    notes: tuple[str, ...] = ()
    for domain, batch in batches.items():
        answer = run.query(
            model,
            loss,
            batch,
            step,
            per_layer=per_layer,
            contraction=contraction,
            unverified=unverified,
            progress=progress,
        )
        ids, found = answer.per_sample()
        scores[domain], notes = found.numpy(), said(answer)
    labels = column(run, np.array([str(x) for x in ids]), by)
    return _valued(scores, labels, step, by, draws, seed, notes)


def _valued(
    scores: Mapping[str, Curve], labels: Any, at: int, by: str, draws: int, seed: int, notes: Sequence[str]
) -> Sources:
    names, inverse = np.unique(labels, return_inverse=True)
    counts = np.bincount(inverse)
    drawn = bootstraps(list(scores.values()), inverse, draws, seed)  # (D, draws, S)
    plain = np.stack([_summed(x.mean(0)[None], inverse, len(names))[0] for x in scores.values()])  # (D, S)
    domains, queries = tuple(scores), [len(x) for x in scores.values()]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)  # (D, S)
    ends = np.quantile(drawn.mean(0), [0.025, 0.975], axis=0)  # (2, S)
    order = np.argsort(-plain.mean(0), kind="stable").tolist()
    total = [
        Value(str(names[s]), ALL, int(counts[s]), sum(queries), float(plain[:, s].mean()), *map(float, ends[:, s]))
        for s in order
    ]
    cells = [
        tuple(
            Value(
                str(names[s]), name, int(counts[s]), queries[d], float(plain[d, s]), float(low[d, s]), float(high[d, s])
            )
            for d, name in enumerate(domains)
        )
        for s in order
    ]
    return Sources(at, by, tuple(str(names[s]) for s in order), domains, tuple(total), tuple(cells), tuple(notes))


def bootstrap(scores: Curve, group: Any, draws: int, seed: int, *, at_once: int = AT_ONCE) -> Curve:
    """Values (draws, S) of scores (Q, M) with queries, and samples inside each group (M,), drawn anew."""
    (values,) = bootstraps([scores], group, draws, seed, at_once=at_once)
    return np.asarray(values)


def bootstraps(scores: Sequence[Curve], group: Any, draws: int, seed: int, *, at_once: int = AT_ONCE) -> Curve:
    """The same for several domains, (D, draws, S); the samples are drawn once, so that all domains see the same."""
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
