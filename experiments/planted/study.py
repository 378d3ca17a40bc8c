r"""The study of planted data: how well does each method find samples that were spoiled on purpose?

    AUROC = P(a planted sample is more suspect than a clean one) + ½ P(equally)          1: all found first; ½: chance

and precision, the share of planted ones among the K most suspect, K being as many as were planted. The interval of the mean over seeds draws
seeds with replacement, and each seed's AUROC with DeLong's variance, var(share of clean ones below each planted) / m + var(the reverse) / n.
The truth beside them is one retraining without all that was planted: whether it hurt the queries at all.

Shapes:  N samples, m planted, n clean.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from experiments.data.images import Setup
from experiments.data.texts import DomainSetup
from experiments.harness import Say, Seed, Table, failures, names_of_all, run_seeds
from experiments.planted.methods import INFLUENCE, SUSPICION, methods
from experiments.planted.setups import PLANTED, problem_of
from experiments.statistics import DRAWS, bounds, mean


def study(
    setup: DomainSetup | Setup, kind: str, seeds: Sequence[int], *, share: float, say: Say | None = None
) -> dict[str, Any]:
    """AUROC and precision of every method, as plain values."""
    chosen, problems = methods(kind == "labels"), (problem_of(setup, kind, seed, share) for seed in seeds)
    results = run_seeds(problems, chosen, ceiling=False, halves=False, say=say)
    rows = [_row(name, results) for name in names_of_all(results, chosen)]
    masks = [seed.notes["bad"] for seed in results]
    return {
        "setup": asdict(setup),
        "kind": kind,
        "share": share,
        "seeds": list(seeds),
        "samples": [len(bad) for bad in masks],
        "planted": [int(bad.sum()) for bad in masks],
        "change": [float(seed.truth[PLANTED][0, 0]) for seed in results],  # negative: what was planted had hurt
        "rows": sorted(rows, key=lambda row: -row["auroc"]),
        "failed": failures(results),
    }


def auroc(scores: Tensor, bad: Tensor) -> tuple[float, float]:
    """`(AUROC, DeLong's variance)`."""
    above = _shares(scores[bad], scores[~bad])  # (m,) clean ones below each planted
    below = 1 - _shares(scores[~bad], scores[bad])  # (n,) planted ones above each clean
    spread = sum(float(x.var()) / len(x) if len(x) > 1 else 0.0 for x in (above, below))
    return float(above.mean()), spread


def _shares(x: Tensor, others: Tensor) -> Tensor:
    """Share of the others that lie below each x, half of the equal ones included."""
    line = others.sort().values
    low, high = (torch.searchsorted(line, x, right=right).double() for right in (False, True))
    return (low + high) / (2 * len(line))


def precision(scores: Tensor, bad: Tensor) -> float:
    """Share of planted ones among as many of the most suspect as were planted."""
    return float(bad[scores.topk(int(bad.sum())).indices].double().mean())


def interval(each: Sequence[tuple[float, float]], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds of (AUROC, variance), within 0 and 1."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(each), DRAWS * len(each), generator=g, dtype=torch.float64)
    mean, spread = (torch.tensor(x, dtype=torch.float64)[:, None] for x in zip(*each, strict=True))
    return bounds((mean + spread.sqrt() * noise).clamp(0, 1), g)


def _row(name: str, seeds: Sequence[Seed]) -> dict[str, Any]:
    """One method; of several settings, the one with the highest mean AUROC: chosen with the answer in hand."""
    masks, made = [seed.notes["bad"] for seed in seeds], [seed.rows[name].made for seed in seeds]
    if not made[0].settings:
        return {"method": name, **figures([scores.values for scores in made], masks)}
    rows = {key: figures([scores.settings[key] for scores in made], masks) for key in made[0].settings}
    best = max(rows, key=lambda key: float(rows[key]["auroc"]))
    return {"method": name, **rows[best], "chosen": best}


def figures(tables: Sequence[Table], masks: Sequence[Tensor]) -> dict[str, Any]:
    """Figures of one method with one setting, from its scores and what was planted, for each seed."""
    pairs = [(table[SUSPICION], bad) for table, bad in zip(tables, masks, strict=True)]
    each = [auroc(*pair) for pair in pairs]
    lower, upper = interval(each)
    out = {"auroc": mean([a for a, _ in each]), "lower": lower, "upper": upper, "seeds": [a for a, _ in each]}
    out["precision"] = mean([precision(*pair) for pair in pairs])
    known = [(table[INFLUENCE], bad) for table, bad in zip(tables, masks, strict=True) if INFLUENCE in table]
    return {**out, **(_signs(known) if known else {})}


def _signs(known: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How many planted and clean samples are predicted to hurt, and what removing all planted would do."""
    return {
        "hurt_planted": mean([float((x[bad] < 0).double().mean()) for x, bad in known]),
        "hurt_clean": mean([float((x[~bad] < 0).double().mean()) for x, bad in known]),
        "predicted": [float(x[bad].sum()) for x, bad in known],
    }
