"""The fidelity study: every method's scores against retraining, in one table, with the ceiling on top.

For each seed: retrain without each removal (truth), unroll exactly (ceiling), ask every method, correlate the ranks. A
swept setting is chosen on the even-numbered removals and scored on the odd-numbered ones.
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

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import reverse
from backstory.results.statistics import spearman
from experiments.data.images import Setup, recipe, removals
from experiments.fidelity.full import replayed
from experiments.fidelity.problem import Method, Problem, Scores
from experiments.fidelity.rows import methods
from experiments.statistics import Pair, difference, interval

Say = Callable[[str, int, int], None]
KINDS = ("single", "all")
QUERY = QuerySet("test", mean=True)
REFERENCE = "paper"
CONTRASTS = (
    ("full-exact", "full-exact-factored"),
    ("full-empirical-auto", "full-empirical-factored"),
    ("learned-16-exact", "full-exact-factored"),
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

    def points(self, name: str | None, kind: str) -> tuple[Tensor, Tensor]:
        """`(scores, truth)` of one method over the removals that count for it; None: of the ceiling."""
        if name is None:
            return self.ceiling[kind], self.truth[kind]
        seen = self.methods[name]
        return seen.scores[kind][seen.counted], self.truth[kind][seen.counted]

    def spearman(self, name: str | None, kind: str) -> float:
        """Of one method, or of the ceiling."""
        return spearman(*self.points(name, kind))

    def pair(self, ours: str, theirs: str, kind: str) -> Pair:
        """Both methods on the removals that count for both."""
        a, b = self.methods[ours], self.methods[theirs]
        both = torch.tensor(sorted(set(a.counted.tolist()) & set(b.counted.tolist())))
        return Pair(self.truth[kind][both], a.scores[kind][both], b.scores[kind][both])


@dataclass(frozen=True)
class Outcome:
    """Everything that a study found."""

    setup: Setup
    seeds: list[int]
    removals: int
    methods: list[Method]
    found: list[Seed]
    skipped: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The table as plain values: rows, ceiling, contrasts, and what was left out and why."""
        return {
            "setup": asdict(self.setup),
            "seeds": self.seeds,
            "removals": self.removals,
            "rows": [_row(method, self.found) for method in self.methods],
            "ceiling": _correlations(self.found, None),
            "contrasts": _contrasts([m.name for m in self.methods], self.found),
            "skipped": self.skipped,
        }


def study(
    setup: Setup,
    seeds: Sequence[int],
    *,
    count: int = 100,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> Outcome:
    """Truth, ceiling and the chosen methods, for each seed."""
    chosen, skipped = select(setup.optimizer, only)
    found = [one_seed(setup, seed, count, chosen, cache, say or (lambda stage, done, total: None)) for seed in seeds]
    return Outcome(setup, list(seeds), count, chosen, found, skipped)


def select(optimizer: str, only: Sequence[str] | None) -> tuple[list[Method], list[str]]:
    """`(the methods to run, why others are left out)`."""
    known = {m.name: m for m in methods(optimizer)}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise UsageError(f"found method {unknown[0]!r}; expected one of {', '.join(known)}.")
    wanted = [m for m in known.values() if (m.default if only is None else m.name in only)]
    why = {m.name: _obstacle(m, optimizer) for m in wanted}
    return [m for m in wanted if not why[m.name]], [f"{name}: {reason}" for name, reason in why.items() if reason]


def _obstacle(method: Method, optimizer: str) -> str:
    """Why a method cannot run here; "" where it can."""
    if optimizer not in method.optimizers:
        return f"it is for {', '.join(method.optimizers)} only"
    if method.extra is not None and find_spec(method.extra) is None:
        return f"{method.extra} is not installed"
    return ""


def one_seed(setup: Setup, seed: int, count: int, chosen: Sequence[Method], cache: Path | None, say: Say) -> Seed:
    """Truth, ceiling and all methods of one seed."""
    single, every = removals(setup, seed, count)

    def make() -> Any:
        return recipe(setup, seed)

    found = leave_out(
        make, [*single, *every], QUERY, lambda done, total: say(f"seed {seed}: retrain", done, total),
        cache=cache, dtype=torch.float64,
    )[:, 0]  # fmt: skip
    exact = reverse(make, QUERY, cache=cache, progress=lambda done, total: say(f"seed {seed}: unroll", done, total))
    of = [exact.sum_over(r.samples, steps=r.steps)[0] for r in (*single, *every)]
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
    row: dict[str, Any] = {
        "method": method.name,
        "projection": method.projection,
        "curvature": method.curvature,
        "optimizer_model": method.optimizer_model,
        **_correlations(found, method.name),
        "seconds": _mean([s.seconds for s in seen]),
        "store_bytes": int(_mean([float(s.store_bytes) for s in seen])),
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


def _correlations(found: Sequence[Seed], name: str | None) -> dict[str, Any]:
    """Means over the seeds, their intervals, and each seed's own; of one method, or of the ceiling."""
    out: dict[str, Any] = {}
    for kind in KINDS:
        each = [seed.spearman(name, kind) for seed in found]
        lower, upper = interval([seed.points(name, kind) for seed in found])
        out |= {kind: _mean(each), f"{kind}_interval": {"lower": lower, "upper": upper}, f"{kind}_seeds": each}
    return out


def _contrasts(names: Sequence[str], found: Sequence[Seed]) -> list[dict[str, Any]]:
    return [
        {"method": a, "against": b, **{kind: _difference(found, a, b, kind) for kind in KINDS}}
        for a, b in CONTRASTS
        if a in names and b in names
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
