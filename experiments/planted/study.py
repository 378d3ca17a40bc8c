r"""The study of planted data: how well does each method find samples that were spoiled on purpose?

    AUROC = P(a planted sample is more suspect than a clean one) + ½ P(equally)          1: all found first; ½: chance

and precision, the share of planted ones among the K most suspect, K being as many as were planted. The interval of the mean over seeds draws
seeds with replacement, and each seed's AUROC with DeLong's variance, var(share of clean ones below each planted) / m + var(the reverse) / n.
The truth beside them is one retraining without all that was planted: whether it hurt the queries at all.

Shapes:  N samples, m planted, n clean.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal
from experiments.data.images import Setup
from experiments.data.texts import DomainSetup
from experiments.planted.methods import Found, Suspects, all_scores
from experiments.planted.setups import Planted, planted
from experiments.statistics import DRAWS, bounds

Say = Callable[[str, int, int], None]


@dataclass
class Seed:
    """Everything about one seed."""

    bad: Tensor  # (N,) bool
    found: Found
    change: float  # of the queries' loss, by retraining without all that was planted


def study(
    setup: DomainSetup | Setup, kind: str, seeds: Sequence[int], *, share: float, say: Say | None = None
) -> dict[str, Any]:
    """AUROC and precision of every method, as plain values."""
    tell = say or (lambda stage, done, total: None)
    found = [one_seed(planted(setup, kind, seed, share), seed, tell) for seed in seeds]
    rows = [_row(name, found) for name in found[0].found]
    return {
        "setup": asdict(setup),
        "kind": kind,
        "share": share,
        "seeds": list(seeds),
        "samples": [len(seed.bad) for seed in found],
        "planted": [int(seed.bad.sum()) for seed in found],
        "change": [seed.change for seed in found],
        "rows": sorted(rows, key=lambda row: -row["auroc"]),
    }


def one_seed(problem: Planted, seed: int, say: Say) -> Seed:
    """Ask every method, and retrain without what was planted."""
    ids, found = all_scores(problem, lambda done, total: say(f"seed {seed}: methods", done, total))
    return Seed(torch.tensor([i in problem.ids for i in ids]), found, retrained(problem))


def retrained(problem: Planted) -> float:
    """How the queries' mean loss changes without all that was planted; negative: it had hurt."""
    plan = problem.make()
    gone = [i for names, _ in plan.batches for i in names if str(i) in problem.ids]
    removal = Removal(tuple(dict.fromkeys(gone)))
    return float(leave_out(problem.make, [removal], lambda model: problem.asked(model, problem.queries))[0, 0])


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


def _row(name: str, found: Sequence[Seed]) -> dict[str, Any]:
    """One method; of several settings, the one with the highest mean AUROC: chosen with the answer in hand."""
    settings = list(found[0].found[name])
    rows = [_scored([(seed.found[name][x], seed.bad) for seed in found]) for x in settings]
    best = max(range(len(rows)), key=lambda k: float(rows[k]["auroc"]))
    return {"method": name, **rows[best], **({"chosen": settings[best]} if len(rows) > 1 else {})}


def _scored(said: Sequence[tuple[Suspects, Tensor]]) -> dict[str, Any]:
    """Figures of one method with one setting, from its suspicions and what was planted, for each seed."""
    each = [auroc(x.scores, bad) for x, bad in said]
    lower, upper = interval(each)
    hits = _mean([precision(x.scores, bad) for x, bad in said])
    out = {"auroc": _mean([a for a, _ in each]), "lower": lower, "upper": upper, "seeds": [a for a, _ in each]}
    known = [(x.influences, bad) for x, bad in said if x.influences is not None]
    return {**out, "precision": hits, **(_signs(known) if known else {})}


def _signs(known: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How many planted and clean samples are said to hurt, and what removing all planted would do."""
    return {
        "hurt_planted": _mean([float((x[bad] < 0).double().mean()) for x, bad in known]),
        "hurt_clean": _mean([float((x[~bad] < 0).double().mean()) for x, bad in known]),
        "predicted": [float(x[bad].sum()) for x, bad in known],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
