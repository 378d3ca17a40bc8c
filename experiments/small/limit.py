r"""The study of a theorem: the influence function is what expected leave-one-out tends to, for long training.

    ratio(T) = T · E_{t_s}[TSLOO] / influence function  →  1        a convex model, a constant rate

for each model and number of steps T, with the standard error over the seeds.
"""

from collections.abc import Callable, Sequence
from typing import Any

from backstory.errors import UsageError
from experiments.small.limit_curve import MODELS, large_t_limit

Say = Callable[[str, int, int], None]
STEPS = (10, 30, 100, 300, 1000)


def study(
    models: Sequence[str] = MODELS,
    steps: Sequence[int] = STEPS,
    seeds: Sequence[int] = tuple(range(8)),
    *,
    rate: float = 0.1,
    batch: int = 16,
    say: Say | None = None,
) -> dict[str, Any]:
    """One curve for each model, as plain values."""
    if not steps or min(steps) < 1 or rate <= 0:
        raise UsageError(f"found steps={list(steps)}, rate={rate}; expected numbers of steps and a rate above 0.")
    curves = []
    for model in models:
        points = []
        for done, T in enumerate(sorted(steps)):
            points.append(_point(model, T, seeds, rate, batch))
            if say is not None:
                say(f"{model}: retrain", done + 1, len(steps))
        curves.append({"model": model, "points": points})
    return {"curves": curves, "seeds": list(seeds), "rate": rate, "batch": batch}


def _point(model: str, T: int, seeds: Sequence[int], rate: float, batch: int) -> dict[str, Any]:
    found = large_t_limit(model, steps=(T,), seeds=seeds, rate=rate, batch=batch)
    return {
        "steps": T,
        "ratio": found.ratios[0],
        "error": found.errors[0],
        "expected": found.expected[0],
        "influence": found.influence,
    }
