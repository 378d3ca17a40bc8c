r"""The study of kinks: how much of what exact unrolling misses is the fault of ReLU.

    gap(f) = ‖truth(f) − unrolled‖ / ‖truth(1)‖        f: the share of its weight that a removal takes away
    share  = 1 − (gap(f) / f) / gap(1)                  f so small that no kink is crossed

Where training is smooth, the gap is of second order and proportional to f. At a kink the gradient jumps, and the
retrained weights jump with ever so small a removal that crosses one: divided by f, that gap grows, until f is too small to
cross any. From there on gap(f) / f is constant: it is the gap that the removal would have without kinks. `share` takes the
first factor that the next one agrees with. Both activations train in the same run: data, start, order and removals of a
seed are the same. So `beyond` = 1 − gap of GELU / gap of ReLU, at f = 1, is a second opinion.

How much of the gap between exact unrolling and retraining comes from kinks (ReLU, max-pooling).

Take only a share f of each removed weight and divide the change by f:

    truth(f) = (ℓ(θ_T with weights (1−f) w) − ℓ(θ_T)) / f          truth(1) is TSLOO
    gap(f)   = ‖truth(f) − unrolled‖                               over all removals and queries

Where training is smooth in the weights, the gap is of second order and shrinks with f. A kink that the run stands close
to is crossed by a small removal too, and the step of the gradient across it does not shrink. So the part of the gap that
is still there at the smallest f is the kinks' share: about f itself for a smooth net. Kinks farther away than the
smallest removal reaches count as smooth.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QueryLoss, QuerySet
from backstory.exact.reverse import reverse
from backstory.replay.tape import Progress, RecipeSource, Removal
from experiments.data.images import ACTIVATIONS, Setup, recipe, removals
from experiments.harness import Say

FACTORS = (1.0, 0.1, 0.01, 1e-4, 1e-5)
NEGLIGIBLE = 1e-9  # a gap of this part of the truth is rounding


@dataclass(frozen=True)
class KinkReport:
    """Relative gaps for shrinking removals, and what they say."""

    factors: tuple[float, ...]
    gaps: tuple[float, ...]  # ‖truth(f) − unrolled‖ / ‖truth(1)‖
    kinks: float  # share of the first gap that the last factor leaves
    smooth: float  # share that disappears

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def kink_share(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query_loss: QueryLoss,
    factors: Sequence[float] = FACTORS,
    *,
    args: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    vectorised: bool | None = None,
    dtype: torch.dtype | None = torch.float64,
    progress: Progress | None = None,
) -> KinkReport:
    """Retrain with the removals and with ever smaller parts of them, largest factor first."""
    chosen = tuple(sorted(factors, reverse=True))
    if len(chosen) < 2 or not 0 < chosen[-1] < chosen[0] <= 1:
        raise UsageError(f"factors must be two or more different numbers between 0 and 1, got {tuple(factors)}.")
    answer = reverse(recipe, query_loss, args=args, dtype=dtype, cache=cache)
    unrolled = torch.stack([answer.sum_over(r.samples, steps=r.steps) for r in removals])  # (removals, Q)
    shrunk = [replace(r, share=f) for f in chosen for r in removals]
    result = leave_out(
        recipe, shrunk, query_loss, progress, args=args, cache=cache, vectorised=vectorised, dtype=dtype
    ).reshape(len(chosen), *unrolled.shape)
    truths = [rows / f for rows, f in zip(result, chosen, strict=True)]
    size = float(truths[0].norm())
    gaps = [float((truth - unrolled).norm()) / max(size, 1e-300) for truth in truths]
    kinks = min(1.0, gaps[-1] / gaps[0]) if gaps[0] > NEGLIGIBLE else 0.0
    return KinkReport(chosen, tuple(gaps), kinks, 1.0 - kinks)


KINDS = ("single", "all")
QUERY = QuerySet("test", mean=True)
AGREE = 0.25  # relative difference of gap(f) / f at two factors in a row; the smallest ones are near rounding


def study(
    setup: Setup,
    seeds: Sequence[int],
    activations: Sequence[str] = ("relu", "gelu"),
    *,
    count: int = 20,
    factors: Sequence[float] = FACTORS,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """A row for each activation and kind of removal: gaps and shares, means and each seed's."""
    unknown = [a for a in activations if a not in ACTIVATIONS]
    if unknown or not activations or not seeds:
        raise UsageError(
            f"give activations among {', '.join(ACTIVATIONS)}, and one or more seeds, got {list(activations)} and {seeds}."
        )
    rows = []
    for activation in activations:
        chosen = replace(setup, activation=activation)
        each = [_one_seed(chosen, seed, count, factors, cache, say) for seed in seeds]
        rows += [_row(activation, kind, [reports[kind] for reports in each]) for kind in KINDS]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "rows": rows,
        "beyond": {kind: _beyond(rows, kind) for kind in KINDS},
    }


def _one_seed(
    setup: Setup, seed: int, count: int, factors: Sequence[float], cache: Path | None, say: Say | None
) -> dict[str, dict[str, Any]]:
    """The report of each kind of removal."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:  # the second kind reads the first one's unrolling
        for kind, gone in zip(KINDS, removals(setup, seed, count), strict=True):
            result[kind] = _report(setup, seed, gone, factors, cache or Path(folder), _teller(setup, seed, kind, say))
    return result


def _report(
    setup: Setup,
    seed: int,
    gone: Sequence[Removal],
    factors: Sequence[float],
    cache: Path,
    tell: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    return kink_share(lambda: recipe(setup, seed), gone, QUERY, factors, cache=cache, progress=tell).as_dict()


def _teller(setup: Setup, seed: int, kind: str, say: Say | None) -> Callable[[int, int], None] | None:
    if say is None:
        return None
    return lambda done, total: say(f"{setup.activation}, seed {seed}, {kind}: retrain", done, total)


def _row(activation: str, kind: str, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    factors, gaps = reports[0]["factors"], [report["gaps"] for report in reports]
    first, *later = (_mean(column) for column in zip(*gaps, strict=True))
    shares = [_share(factors, each) for each in gaps]
    known = [share for share in shares if share is not None]
    return {
        "activation": activation,
        "kind": kind,
        "factors": list(factors),
        "gaps": [first, *later],
        "peak": max(later) / max(first, 1e-300),
        "share": _mean(known) if len(known) == len(shares) else None,
        "share_seeds": shares,
        "gaps_seeds": [list(g) for g in gaps],
    }


def _share(factors: Sequence[float], gaps: Sequence[float]) -> float | None:
    """The kinks' share of the first gap; None where no two factors in a row agree."""
    slopes = [gap / f for gap, f in zip(gaps, factors, strict=True)]
    for here, following in pairwise(slopes):
        if abs(following - here) <= AGREE * here:
            return 1 - here / slopes[0]
    return None


def _beyond(rows: Sequence[dict[str, Any]], kind: str) -> float | None:
    """The share of ReLU's gap that GELU's run does not have; None unless both ran."""
    first = {row["activation"]: row["gaps"][0] for row in rows if row["kind"] == kind}
    return 1 - first["gelu"] / first["relu"] if len(first) == 2 else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
