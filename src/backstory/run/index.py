r"""An approximate index over embeddings: the highest and the lowest influences without a pass over all of them.

The index (`store.index`) names candidates, some times as many as asked for, at both ends: the largest ⟨v, e⟩ and, with −v, the
smallest. Their influences are then computed from the embeddings themselves, so that what is approximate is *which* occurrences
are found, never their influence. How many are found is measured before an index is used, on gradient rows of the run as queries:

    recall@k = the part of the k highest (lowest) of the exact answer that is among the k highest (lowest) found

and as many partitions are searched as that takes.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import StoreError, UsageError
from ..store import RunStore
from .embed import Progress
from .occurrences import Labels, rows_before
from .scoring import by_embeddings, collect_best, pieces

CANDIDATES = 8  # at each end, as a multiple of what is kept: the index orders them by a few bits of each coordinate
BYTES = 64 << 20  # of candidates' embeddings in memory
AT = 10  # k of the recall that is measured
LEAST = 1 / 16  # part of the partitions that is searched at least


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """What was built, and how much of the exact answer it finds."""

    at: int
    occurrences: int
    dims: int
    partitions: int
    probes: int  # partitions that a question looks into
    queries: int  # gradient rows that were asked to measure the recall
    k: int  # of recall@k
    recall_highest: float
    recall_lowest: float
    bytes: int  # of the index on disk
    seconds: float  # to build and to measure
    exact_seconds: float  # a question, by all embeddings, where many are asked at once
    index_seconds: float  # a question, by the index

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def build_index(
    store: RunStore, at: int, *, recall: float, queries: int, seed: int, progress: Progress | None = None
) -> IndexReport:
    """Index the embeddings at `at` and measure it; the widest search is used where no narrower one reaches `recall`."""
    if not 0 < recall <= 1 or queries < 1:
        raise UsageError(
            f"found recall={recall}, queries={queries}; expected a share above 0 and at most 1, and at least 1 query."
        )
    began, n_rows = time.perf_counter(), rows_before(store, at)
    v, k = _sampled(store, n_rows, queries, seed), max(1, min(AT, n_rows // 2))
    asked = time.perf_counter()
    exact, largest = _exact(store, v, at, n_rows, k, progress)
    exact_seconds = (time.perf_counter() - asked) / len(v)
    blocks = ((lo, store.read_embeddings(at, lo, hi)) for lo, hi in pieces(n_rows, store.width))
    facts = store.write_index(at, blocks, largest)
    found, seconds = _tuned(store, facts, v, k, exact, recall)
    said = {"k": k, "queries": len(v), **found}
    store.settle_index(at, {**facts, **said})
    return IndexReport(
        at=at, occurrences=n_rows, dims=store.width, partitions=facts["partitions"], bytes=store.index_bytes(at),
        seconds=time.perf_counter() - began, exact_seconds=exact_seconds, index_seconds=seconds, **said,
    )  # fmt: skip


def _sampled(store: RunStore, n_rows: int, count: int, seed: int) -> Tensor:
    """Gradient rows of the run as queries, (Q, p): drawn by seed, in the order of training."""
    drawn = torch.randint(n_rows, (min(count, n_rows),), generator=torch.Generator().manual_seed(seed))
    rows = [store.read(row, row + 1).rows for row in sorted(set(drawn.tolist()))]
    return torch.cat([x for x in rows if x is not None])


def _exact(store: RunStore, v: Tensor, at: int, n_rows: int, k: int, progress: Progress | None) -> tuple[Tensor, float]:
    """`(the k highest and k lowest influences (Q, 2k), the largest number of all embeddings)`, in one pass."""
    largest = 0.0

    def scores() -> Iterator[tuple[int, Tensor]]:
        nonlocal largest
        for lo, hi in pieces(n_rows, store.width):
            E = store.read_embeddings(at, lo, hi)  # (n, p)
            largest = max(largest, float(E.abs().max()))
            if progress is not None:
                progress(hi, n_rows)
            yield lo, v @ E.T

    return collect_best(scores(), len(v), k)[0], largest


def _tuned(
    store: RunStore, facts: Mapping[str, Any], v: Tensor, k: int, exact: Tensor, wanted: float
) -> tuple[dict[str, Any], float]:
    """The fewest partitions, doubled each time, that reach the recall; seconds of a question with them."""
    partitions, probes = facts["partitions"], max(1, round(LEAST * facts["partitions"]))
    while True:
        began = time.perf_counter()
        values, _ = search(store, {**facts, "probes": probes}, v, k)
        seconds = (time.perf_counter() - began) / len(v)
        high, low = _recalls(values, exact, k)
        if probes >= partitions or min(high, low) >= wanted:
            return {"probes": probes, "recall_highest": high, "recall_lowest": low}, seconds
        probes = min(partitions, 2 * probes)


def _recalls(found: Tensor, exact: Tensor, k: int) -> tuple[float, float]:
    """Parts of the k highest and of the k lowest that were found; equal values are equally good."""
    rounding = 1e-5 * exact.abs().amax(1, keepdim=True)
    high = found[:, :k] >= exact[:, k - 1, None] - rounding
    low = found[:, -k:] <= exact[:, -k, None] + rounding
    return float(high.double().mean()), float(low.double().mean())


def search(store: RunStore, facts: Mapping[str, Any], v: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`(influences, row numbers)` (Q, ≤ 2k): about the k highest, then about the k lowest, in falling order."""
    if facts["rows"] <= 2 * k:
        return collect_best(by_embeddings(store, v, facts["at"], facts["rows"], None), len(v), k)
    some = max(1, BYTES // (2 * CANDIDATES * k * store.width * v.element_size()))  # queries at once
    found = [x for part in v.split(some) for x in _ranked(store, facts, part, k)]
    return torch.stack([x for x, _ in found]), torch.stack([rows for _, rows in found])


def _ranked(store: RunStore, facts: Mapping[str, Any], v: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The candidates of each query by their influence; embeddings are read once for all queries."""
    candidates = [_candidates(store, facts, q, k) for q in v]
    known = torch.cat(candidates).unique()
    E = store.take_embeddings(facts["at"], known.tolist(), dtype=v.dtype)
    for q, rows in zip(v, candidates, strict=True):
        values = (E[torch.searchsorted(known, rows)] @ q).double()
        order = values.argsort(descending=True)
        kept = torch.cat([order[:k], order[-k:]])
        yield values[kept], rows[kept]


def _candidates(store: RunStore, facts: Mapping[str, Any], q: Tensor, k: int) -> Tensor:
    """Row numbers at both ends of one query, in order of rows; all partitions are searched where some have too few."""
    for probes in (facts["probes"], facts["partitions"]):
        ends = [store.nearest(facts, x, CANDIDATES * k, probes) for x in (q, -q)]
        rows = torch.tensor(sorted({*ends[0], *ends[1]}), dtype=torch.int64)
        if len(rows) >= 2 * k:
            return rows
    raise StoreError(
        f"the index at step {facts['at']} names {len(rows)} occurrences, expected at least {2 * k}. Build it again with run.build_index()."
    )


def labels(store: RunStore, rows: Tensor) -> Labels:
    """Ids and steps of chosen rows, (Q, M) each, without reading any other."""
    known = rows.unique()
    samples, steps = store.labels(known.tolist())
    where = torch.searchsorted(known, rows).numpy()
    return np.array(samples)[where], np.array(steps)[where]


def index_at(store: RunStore, step: int, keep: int | None) -> dict[str, Any]:
    """The facts of the index that answers at `step`."""
    if keep is None:
        raise UsageError("method='index' finds the ends of a list only: pass keep=k, or ask without an index.")
    if (found := store.index(step)) is None:
        raise UsageError(
            f"no index of the embeddings that the run has for step {step} (embedding again makes an older one useless): "
            f"call run.build_index({step}) first."
        )
    return found


def index_note(facts: Mapping[str, Any]) -> str:
    """What an answer by an index must say."""
    return (
        f"found by an approximate index: on {facts['queries']} rows of this run it finds {facts['recall_highest']:.1%} of the "
        f"{facts['k']} highest and {facts['recall_lowest']:.1%} of the {facts['k']} lowest; the influences are those of the embeddings"
    )
