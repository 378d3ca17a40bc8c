"""The fidelity study: every method's scores against retraining, in one table, with the ceiling on top.

For each seed: retrain without each removal (truth), unroll exactly (ceiling), ask every method, correlate the ranks. A
swept setting is chosen on the even-numbered removals and scored on the odd-numbered ones.
Knows nothing of printing.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..truth import QuerySet, tsloo, unroll
from .fidelity_full import replayed
from .fidelity_methods import methods
from .fidelity_problem import Method, Problem, Scores
from .fidelity_setups import Setup, recipe, removals
from .fidelity_stats import Pair, difference, spearman

Say = Callable[[str, int, int], None]
KINDS = ("single", "all")
QUERY = QuerySet("test", mean=True)
REFERENCE = "paper"
CONTRASTS = (
    ("learned-16-exact", "full-exact"),
    ("learned-16-exact", "random-32-exact"),
    ("learned-16-exact-epoch", "full-exact"),
    ("learned-16-exact-epoch", "learned-16-exact"),
    ("learned-16-exact-epoch", "random-32-exact"),
    ("learned-16-sampled-1", "learned-16-empirical"),
    ("learned-16-sampled-4", "learned-16-sampled-1"),
    ("learned-16-exact", "learned-16-sampled-4"),
    ("learned-16-exact", "learned-16-exact-per-layer"),
    ("learned-16-exact-corrected", "learned-16-exact"),
    ("full-exact-corrected", "full-exact"),
    ("learned-16-exact-corrected", "full-exact-corrected"),
    ("learned-16-empirical", "random-16-empirical"),
)


@dataclass(frozen=True)
class Seen:
    """One method on one seed: its scores, and which removals count."""

    scores: dict[str, Tensor]  # kind -> (n,)
    counted: Tensor  # indices of the removals
    seconds: float
    store_bytes: int
    chosen: dict[str, str] = field(default_factory=dict)  # kind -> the setting that was chosen


@dataclass
class Seed:
    """Everything about one seed."""

    truth: dict[str, Tensor]
    ceiling: dict[str, Tensor]
    methods: dict[str, Seen] = field(default_factory=dict)

    def spearman(self, name: str, kind: str) -> float:
        """Of one method, over the removals that count for it."""
        seen = self.methods[name]
        return spearman(seen.scores[kind][seen.counted], self.truth[kind][seen.counted])

    def pair(self, ours: str, theirs: str, kind: str) -> Pair:
        """Both methods on the removals that count for both."""
        a, b = self.methods[ours], self.methods[theirs]
        both = torch.tensor(sorted(set(a.counted.tolist()) & set(b.counted.tolist())))
        return Pair(self.truth[kind][both], a.scores[kind][both], b.scores[kind][both])


def study(
    setup: Setup,
    seeds: Sequence[int],
    *,
    count: int = 100,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """The table as plain values: rows, ceiling, contrasts, and what was left out and why."""
    chosen, skipped = select(only)
    found = [one_seed(setup, seed, count, chosen, cache, say or (lambda stage, done, total: None)) for seed in seeds]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "rows": [_row(method, found) for method in chosen],
        "ceiling": _ceiling(found),
        "contrasts": _contrasts([m.name for m in chosen], found),
        "skipped": skipped,
    }


def select(only: Sequence[str] | None) -> tuple[list[Method], list[str]]:
    """`(the methods to run, why others are left out)`."""
    known = {m.name: m for m in methods()}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise UsageError(f"found method {unknown[0]!r}; expected one of {', '.join(known)}.")
    wanted = [m for m in known.values() if (m.default if only is None else m.name in only)]
    missing = [m for m in wanted if m.extra is not None and find_spec(m.extra) is None]
    return [m for m in wanted if m not in missing], [f"{m.name}: {m.extra} is not installed" for m in missing]


def one_seed(setup: Setup, seed: int, count: int, chosen: Sequence[Method], cache: Path | None, say: Say) -> Seed:
    """Truth, ceiling and all methods of one seed."""
    single, every = removals(setup, seed, count)

    def make() -> Any:
        return recipe(setup, seed)

    found = tsloo(
        make, [*single, *every], QUERY, lambda done, total: say(f"seed {seed}: retrain", done, total),
        cache=cache, dtype=torch.float64,
    )[:, 0]  # fmt: skip
    exact = unroll(make, QUERY, cache=cache, progress=lambda done, total: say(f"seed {seed}: unroll", done, total))
    of = [exact.of(r.samples, steps=r.steps)[0] for r in (*single, *every)]
    out = Seed(_halves(found, count), _halves(torch.stack(of), count))
    with tempfile.TemporaryDirectory() as folder:
        problem = Problem(setup, seed, replayed(make()), [int(r.samples[0]) for r in single], Path(folder))
        for done, method in enumerate(chosen):
            out.methods[method.name] = _seen(method, problem, out.truth)
            say(f"seed {seed}: methods", done + 1, len(chosen))
    return out


def _halves(values: Tensor, count: int) -> dict[str, Tensor]:
    return dict(zip(KINDS, values.split(count), strict=True))


def _seen(method: Method, problem: Problem, truth: dict[str, Tensor]) -> Seen:
    began = time.perf_counter()
    scores = method.run(problem)
    seconds = time.perf_counter() - began + scores.earlier
    n = len(problem.samples)
    if not scores.settings:
        both = {"single": scores.single, "all": scores.all}
        return Seen(both, torch.arange(n), seconds, scores.store_bytes)
    best = {kind: _best(scores, k, truth[kind], torch.arange(0, n, 2)) for k, kind in enumerate(KINDS)}
    both = {kind: scores.settings[best[kind]][k] for k, kind in enumerate(KINDS)}
    return Seen(both, torch.arange(1, n, 2), seconds, scores.store_bytes, best)


def _best(scores: Scores, k: int, truth: Tensor, half: Tensor) -> str:
    """The setting with the highest correlation on one half of the removals."""
    return max(scores.settings, key=lambda name: spearman(scores.settings[name][k][half], truth[half]))


def _row(method: Method, found: Sequence[Seed]) -> dict[str, Any]:
    seen = [seed.methods[method.name] for seed in found]
    each = {kind: [seed.spearman(method.name, kind) for seed in found] for kind in KINDS}
    row: dict[str, Any] = {
        "method": method.name,
        "subspace": method.subspace,
        "curvature": method.curvature,
        "optimizer_model": method.optimizer_model,
        **{kind: _mean(each[kind]) for kind in KINDS},
        "seconds": _mean([s.seconds for s in seen]),
        "store_bytes": int(_mean([float(s.store_bytes) for s in seen])),
        **{f"{kind}_seeds": each[kind] for kind in KINDS},
        "removals_counted": len(seen[0].counted),
    }
    if method.name != REFERENCE and REFERENCE in found[0].methods:
        row |= {f"{kind}_against_paper": _difference(found, method.name, REFERENCE, kind) for kind in KINDS}
    if seen[0].chosen:
        row["chosen"] = [s.chosen for s in seen]
    return row


def _difference(found: Sequence[Seed], ours: str, theirs: str, kind: str) -> dict[str, float]:
    mean, lower, upper = difference([seed.pair(ours, theirs, kind) for seed in found])
    return {"mean": mean, "lower": lower, "upper": upper}


def _ceiling(found: Sequence[Seed]) -> dict[str, Any]:
    each = {kind: [spearman(seed.ceiling[kind], seed.truth[kind]) for seed in found] for kind in KINDS}
    return {**{k: _mean(v) for k, v in each.items()}, **{f"{k}_seeds": v for k, v in each.items()}}


def _contrasts(names: Sequence[str], found: Sequence[Seed]) -> list[dict[str, Any]]:
    return [
        {"method": a, "against": b, **{kind: _difference(found, a, b, kind) for kind in KINDS}}
        for a, b in CONTRASTS
        if a in names and b in names
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
