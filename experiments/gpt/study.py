"""The GPT study: every method's scores against retraining on four query domains.

For each seed: retrain without each removed sequence (truth), unroll exactly (ceiling), ask every row, correlate the ranks
on each domain and take the mean of the four. A swept setting is chosen on the even-numbered removals and scored on the
odd-numbered ones.

The rows `exact` and `exact-float32` are the reverse sweep in two precisions: the first is the ceiling, and the second against it says what rounding costs.

By thirds of the run (`experiments.thirds`): every row that scores single occurrences is compared with exact unrolling over all of
them, in ranks and in sizes; and every row with retraining over the removals of each third. A sequence is used once, so that
a removal lies in the third of that step.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpt.methods import WHICH, Row, methods, problem_of
from experiments.gpt.setups import GptSetup
from experiments.harness import CEILING, Say, Seed, agreements, costs, failures, minus, names_of_all, run_seeds, select
from experiments.thirds import against_exact, retrained

REFERENCE = "paper"
OTHERS = ("influence-1e-3", "influence-swept")
CONTRASTS = (
    *((ours, other) for ours in ("default", "full-empirical/12", "full-empirical/6") for other in OTHERS),
    ("full-empirical/6", "full-empirical/6-expanding"),
    ("full-sampled-1/6", "full-sampled-1/6-expanding"),
    ("learned-16-empirical/6", "learned-16-empirical/6-expanding"),
    ("learned-16-sampled-1/6", "learned-16-empirical/6"),
    ("default", "learned-16-empirical/6"),  # windows, beside every occurrence's own curvature
    ("default", "float16"),
    ("default", "fast"),
    ("best", "default"),
    ("int8-compressed", "learned-16-empirical/6-compressed"),
    ("default", "random-32-empirical/6"),  # the store that others are measured by
    ("learned-auto-0.9-empirical/6", "learned-16-empirical/6"),
    ("learned-auto-0.95-empirical/6", "learned-16-empirical/6"),
    ("learned-16-empirical/6-compressed", "random-32-empirical/6"),
    ("int8-compressed", "random-32-empirical/6"),
    ("full-empirical/6-compressed", "full-empirical/6"),
    ("full-sampled-1/6-compressed", "full-sampled-1/6"),
    ("learned-16-sampled-1/6-compressed", "learned-16-sampled-1/6"),
    ("learned-16-empirical/6", "learned-16-empirical/6-per-layer"),
    ("learned-16-empirical/6", "random-16-empirical/6"),
    ("learned-16-empirical/6-int8", "learned-16-empirical/6"),
)


def study(
    setup: GptSetup,
    seeds: Sequence[int],
    *,
    count: int = 40,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Truth, ceiling and the chosen rows, for each seed, as plain values."""
    chosen, _ = select(methods(), only)
    results = run_seeds((problem_of(setup, seed, count) for seed in seeds), chosen, cache=cache, say=say)
    names = names_of_all(results, chosen)
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "rows": [_row(method, results) for method in chosen if method.name in names],
        "ceiling": {**agreements(results, CEILING, WHICH), "thirds": retrained(results, CEILING, WHICH)},
        "contrasts": [
            {"method": a, "against": b, **minus(results, a, b, WHICH)} for a, b in CONTRASTS if {a, b} <= set(names)
        ],
        "failed": failures(results),
    }


def _row(method: Row, seeds: Sequence[Seed]) -> dict[str, Any]:
    rows, cost = [seed.rows[method.name] for seed in seeds], costs(seeds, method.name)
    paired = method.name != REFERENCE and all(REFERENCE in seed.rows for seed in seeds)
    return {
        "method": method.name,
        **rows[0].made.about,
        **agreements(seeds, method.name, WHICH),
        **against_exact(seeds, method.name),
        "thirds": retrained(seeds, method.name, WHICH),
        "against_paper": minus(seeds, method.name, REFERENCE, WHICH) if paired else None,
        "recording_ratio": cost.get("recording_ratio"),
        "bytes_per_occurrence": cost.get("bytes_per_occurrence"),
        "seconds": cost["seconds"],
        "removals_counted": len(rows[0].counted),
        "chosen": [row.chosen[WHICH] for row in rows] if rows[0].chosen else None,
        "default": method.about.get("default", False),
    }
