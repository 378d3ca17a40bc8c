"""The fidelity study: every method's scores against retraining, in one table, with the ceiling on top.

For each seed: retrain without each removal (truth), unroll exactly (ceiling), ask every method, correlate the ranks. A
swept setting is chosen on the even-numbered removals and scored on the odd-numbered ones.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.data.images import Setup
from experiments.fidelity.methods import KINDS, Row, methods, problem_of
from experiments.harness import CEILING, Say, Seed, agreements, costs, failures, minus, names_of_all, run_seeds, select

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
class Outcome:
    """Everything that the tables and the page show."""

    setup: Setup
    numbers: list[int]  # the seeds' numbers
    removals: int
    methods: list[Row]  # those with numbers on every seed
    seeds: list[Seed]
    skipped: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The table as plain values: rows, ceiling, contrasts, and what was left out and why."""
        names = [m.name for m in self.methods]
        contrasts = [(a, b) for a, b in CONTRASTS if a in names and b in names]
        return {
            "setup": asdict(self.setup),
            "seeds": self.numbers,
            "removals": self.removals,
            "rows": [self._row(method) for method in self.methods],
            "ceiling": self.agreements(CEILING),
            "contrasts": [{"method": a, "against": b, **self._minus(a, b)} for a, b in contrasts],
            "skipped": self.skipped,
        }

    def agreements(self, name: str) -> dict[str, Any]:
        """Means over the seeds, their intervals, and each seed's own, for both kinds of removal."""
        out: dict[str, Any] = {}
        for kind in KINDS:
            row = agreements(self.seeds, name, kind)
            out |= {kind: row["mean"], f"{kind}_interval": row["interval"], f"{kind}_seeds": row["seeds"]}
        return out

    def _minus(self, ours: str, theirs: str, suffix: str = "") -> dict[str, Any]:
        return {f"{kind}{suffix}": minus(self.seeds, ours, theirs, kind) for kind in KINDS}

    def _row(self, method: Row) -> dict[str, Any]:
        cost, rows = costs(self.seeds, method.name), [seed.rows[method.name] for seed in self.seeds]
        paired = method.name != REFERENCE and all(REFERENCE in seed.rows for seed in self.seeds)
        return {
            "method": method.name,
            **method.about,
            **self.agreements(method.name),
            "seconds": cost["seconds"],
            "store_bytes": int(cost.get("store_bytes", 0)),
            "removals_counted": len(rows[0].counted),
            **(self._minus(method.name, REFERENCE, "_against_paper") if paired else {}),
            **({"chosen": [row.chosen for row in rows]} if rows[0].chosen else {}),
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
    chosen, skipped = select(methods(setup.optimizer), only)
    results = run_seeds((problem_of(setup, seed, count) for seed in seeds), chosen, cache=cache, say=say)
    names = names_of_all(results, chosen)
    done = [m for m in chosen if m.name in names]
    return Outcome(setup, list(seeds), count, done, results, skipped + failures(results))
